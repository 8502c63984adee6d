"""Sandboxes that are containers of a Docker engine, and images of an engine in folders: `doctor --unpack`."""
