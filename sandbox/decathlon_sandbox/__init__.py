"""The driver: our only process inside a sandbox. Standard library only, Python 3.10 or later."""
