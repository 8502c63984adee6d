"""An episode's calls are made again in a new one, and compared: `replay`."""
