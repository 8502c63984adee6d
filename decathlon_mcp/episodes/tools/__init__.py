"""The tools of an episode."""
