"""Sandboxes that are processes of this machine: how they are started, found, reattached and ended."""
