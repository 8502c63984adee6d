"""Fakes for tests: a provider whose sandboxes run in this process, with configurable faults."""
