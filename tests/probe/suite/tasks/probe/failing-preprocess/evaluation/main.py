"""Always passes."""
