"""Tests of local tools and truncated results."""
