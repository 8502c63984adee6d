"""One server for all tests of a module. Its sandboxes are containers."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.cheats.agent import LOW_LIMITS, SUITE, CheatServer, cheat_server
from tests.probe.serving import serving


@pytest.fixture(scope="module", name="cheats")
async def docker_cheat_server(
    test_image: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[CheatServer]:
    state = tmp_path_factory.mktemp("state")
    async with (
        serving(state, suite=(SUITE,), provider="docker", image=test_image, **LOW_LIMITS) as served,
        cheat_server(served) as server,
    ):
        yield server
