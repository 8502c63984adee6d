"""The fixtures of the tests, for the checks that are run by name."""

from __future__ import annotations

from tests.conftest import anyio_backend, docker_engine, test_image

__all__ = ["anyio_backend", "docker_engine", "test_image"]
