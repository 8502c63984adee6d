"""Checks that every provider of sandboxes must pass: `suite`. No server uses them."""
