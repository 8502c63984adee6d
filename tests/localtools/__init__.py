"""Local tools and truncated replies."""
