"""Sandboxes as plain processes of this machine, without isolation."""
