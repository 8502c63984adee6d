"""A fake arXiv server, and a small suite whose task uses it."""
