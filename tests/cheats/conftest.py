"""One server for all tests of a module, for each provider that isolates.

With `long` tests, also on this machine's files, where servers start by themselves (`namespaces`) and as forks
of preloaders (`forks`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tests.cheats.agent import (
    LOW_LIMITS,
    SUITE,
    CheatServer,
    cheat_server,
    forked_cheat_server,
    forked_suite,
)
from tests.probe.serving import module_server, serving

# Bubblewrap's isolation has its conformance suite, and `test_local_namespaces` attacks the same namespaces.
LONG = ("image", "gvisor", "namespaces", "forks")


@pytest.fixture(
    scope="module", params=["docker", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def provider(request: pytest.FixtureRequest) -> str:
    return request.param


def provider_settings(provider: str) -> dict[str, Any]:
    """The settings that choose it; `image` and `gvisor` are images of the provider `host`."""
    if provider == "docker":
        return {"provider": "docker"}
    if provider in ("namespaces", "forks"):
        return {"provider": "host", "isolation": "namespaces", "preload": provider == "forks"}
    return {"provider": "host", "kernel": "gvisor" if provider == "gvisor" else None}


@pytest.fixture(scope="module")
def image(provider: str, request: pytest.FixtureRequest) -> str | None:
    """The tests' image, as the provider needs it; None for this machine's files."""
    if provider in ("namespaces", "forks"):
        request.getfixturevalue("namespaces")
        return None
    if provider == "gvisor":
        request.getfixturevalue("runsc")
    return request.getfixturevalue("test_image" if provider == "docker" else "unpacked_image")


@pytest.fixture(scope="module", name="cheats")
async def isolated_cheat_server(
    provider: str, image: str | None, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[CheatServer]:
    state = tmp_path_factory.mktemp("state")
    suite = forked_suite(tmp_path_factory.mktemp("suite")) if provider == "forks" else SUITE
    settings: dict[str, Any] = {"suite": (suite,), "image": image}
    settings |= {**provider_settings(provider), **LOW_LIMITS}
    async with (
        serving(state, **settings) as served,
        forked_cheat_server(served) if provider == "forks" else cheat_server(served) as server,
    ):
        yield server


server = module_server(suite=(SUITE,), provider="host")
