"""A suite for tests: one quick server whose tools do what tests need, and tasks that go well and badly."""
