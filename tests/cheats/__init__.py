"""Cheats: what an agent that is root in its sandbox and knows this code may try, and what it gets."""
