"""Code shared by the evaluators."""
