"""Providers of sandboxes. Everything above sees the protocols in `base`."""
