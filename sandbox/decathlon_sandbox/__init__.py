"""The driver: the one process of ours inside a sandbox. Standard library only, Python 3.10 and later."""
