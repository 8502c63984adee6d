"""A stand-in for arXiv, and a small suite whose task uses it."""
