"""People play tasks: in a browser at the page's `/play`, or from a script. The command `play`."""
