"""Benchmarks of survival: servers that are killed, deaths in every phase, long runs, and the cost of the store."""
