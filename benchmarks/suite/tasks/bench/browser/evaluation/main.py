"""There is nothing to get wrong."""
