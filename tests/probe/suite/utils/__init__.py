"""Shared code of the probe suite: none."""
