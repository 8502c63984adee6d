"""What a state folder knows about its episodes and runs, for commands, the page and exports."""
