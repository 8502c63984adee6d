"""Sandboxes that are processes of this machine: how they are started, found, taken back and ended."""
