"""Sandboxes on the machines of Prime Intellect."""
