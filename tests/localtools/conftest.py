"""The whole server with a suite of local tools, for every test of a module."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.probe.serving import Served, serving

SUITE = str(Path(__file__).parent / "suite")


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    async with serving(tmp_path_factory.mktemp("state"), suite=(SUITE,), provider="local") as served:
        yield served
