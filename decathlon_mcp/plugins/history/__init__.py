"""The episodes and runs of state folders: `runs`, `show`."""
