"""An arXiv of our own for sandboxes, and a small suite that speaks to it."""
