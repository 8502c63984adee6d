"""Local tools and overlong replies."""
