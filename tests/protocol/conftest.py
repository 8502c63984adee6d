"""Fixtures of the tests of MCP."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import httpx2
import pytest

from tests.probe.serving import Served, serving


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    async with serving(tmp_path_factory.mktemp("state"), provider="host") as served:
        yield served


@pytest.fixture
async def http() -> AsyncGenerator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(timeout=30) as http:
        yield http
