"""The suite of cheats: an agent that is root in its sandbox and knows this code, and what it gets for it."""
