"""The suite's shared code."""
