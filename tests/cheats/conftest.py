"""One server for all the cheats of a module, whose sandboxes are containers."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.cheats.agent import SMALL, SUITE, Arena, arena
from tests.probe.serving import serving


@pytest.fixture(scope="module", name="arena")
async def in_containers(
    test_image: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[Arena]:
    state = tmp_path_factory.mktemp("state")
    async with (
        serving(state, suite=(SUITE,), provider="docker", image=test_image, **SMALL) as served,
        arena(served) as opened,
    ):
        yield opened
