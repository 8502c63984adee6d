"""What this suite calls openai-agents: of the real one it has only what a tool asks for."""

print("importing this takes long")


class Judge:
    """Not among what is stood in for."""
