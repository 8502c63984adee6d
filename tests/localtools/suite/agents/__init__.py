"""Fake of the real package openai-agents, with only the names that this suite's tools import."""

print("importing this takes long")


class Judge:
    """A class that the stub of openai-agents does not have."""
