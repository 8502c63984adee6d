"""Kept attempts are graded again with the evaluators of now: `regrade`."""
