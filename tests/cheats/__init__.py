"""Attempts to cheat by an agent that is root in its sandbox and knows this code, and their results."""
