"""Grading: from a closed attempt to a signed verdict."""
