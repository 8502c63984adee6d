"""Grading of kept attempts again, with the present evaluators: `regrade`."""
