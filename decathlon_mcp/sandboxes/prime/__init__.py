"""Sandboxes of Prime Intellect's service."""
