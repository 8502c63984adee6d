"""Sandboxes as containers of a Docker engine."""
