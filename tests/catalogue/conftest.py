"""Fixtures of the suites' tests, for the catalogue's tests."""

from __future__ import annotations

from tests.suites.conftest import checkout, gym

__all__ = ["checkout", "gym"]
