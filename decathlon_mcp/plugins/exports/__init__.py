"""Episodes and tasks for other tools: `export`."""
