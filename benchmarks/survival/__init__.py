"""Benchmarks of survival: killed servers, deaths in every phase, long runs, and the cost of the store."""
