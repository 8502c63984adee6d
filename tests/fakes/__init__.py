"""Fakes for tests: a provider whose sandboxes live in this process, with faults on demand."""
