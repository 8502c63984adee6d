"""The audit of tasks: its policies, and that each finds what it is for."""
