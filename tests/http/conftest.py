"""Fixtures of the tests over HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import httpx2
import pytest

from tests.http.messages import ACCEPT
from tests.probe.serving import Served, serving


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    async with serving(tmp_path_factory.mktemp("state"), provider="host") as served:
        yield served


@pytest.fixture
async def http() -> AsyncGenerator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(headers=ACCEPT, timeout=30) as http:
        yield http
