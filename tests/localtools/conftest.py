"""One server for all tests of a module, with a suite that has local tools."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.probe.serving import Served, serving

SUITE = str(Path(__file__).parent / "suite")


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    async with serving(tmp_path_factory.mktemp("state"), suite=(SUITE,), provider="host") as served:
        yield served
