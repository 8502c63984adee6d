"""Tests of the recorded web, and stand-ins for the sites that tasks use."""
