"""One server for all tests of a module, for each provider that isolates."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.cheats.agent import LOW_LIMITS, SUITE, CheatServer, cheat_server
from tests.probe.serving import Served, serving


# Bubblewrap's isolation has its conformance suite, and `test_local_namespaces` attacks the same namespaces.
@pytest.fixture(
    scope="module",
    params=["docker", *(pytest.param(name, marks=pytest.mark.long) for name in ("bubblewrap", "gvisor"))],
)
def provider(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def image(provider: str, request: pytest.FixtureRequest) -> str:
    """The tests' image, as the provider needs it."""
    if provider == "gvisor":
        request.getfixturevalue("runsc")
    return request.getfixturevalue("test_image" if provider == "docker" else "unpacked_image")


@pytest.fixture(scope="module", name="cheats")
async def isolated_cheat_server(
    provider: str, image: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[CheatServer]:
    state = tmp_path_factory.mktemp("state")
    async with (
        serving(state, suite=(SUITE,), provider=provider, image=image, **LOW_LIMITS) as served,
        cheat_server(served) as server,
    ):
        yield server


@pytest.fixture(scope="module", name="server")
async def local_server(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[Served]:
    async with serving(tmp_path_factory.mktemp("state"), suite=(SUITE,), provider="local") as served:
        yield served
