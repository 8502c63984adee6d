"""One server for all tests of a module, for each provider that isolates."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.cheats.agent import LOW_LIMITS, SUITE, CheatServer, cheat_server
from tests.probe.serving import Served, serving

SAME_WITH_EVERY_PROVIDER = frozenset({"test_files", "test_grading", "test_honest_work", "test_replies"})
"""Modules whose attacks do not depend on how a sandbox is isolated: on evaluators, and on the server. They
take a minute with each provider, so they run with one only, unless DECATHLON_TEST_EVERY_PROVIDER is set."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("DECATHLON_TEST_EVERY_PROVIDER"):
        return
    here = Path(__file__).parent
    others = [
        item
        for item in items
        if item.path.parent == here
        and item.path.stem in SAME_WITH_EVERY_PROVIDER
        and "bubblewrap" in item.name
    ]
    config.hook.pytest_deselected(items=others)
    deselected = set(others)
    items[:] = [item for item in items if item not in deselected]


@pytest.fixture(scope="module", params=["docker", "bubblewrap"])
def provider(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def image(provider: str, request: pytest.FixtureRequest) -> str:
    """The tests' image, as the provider needs it."""
    return request.getfixturevalue("unpacked_image" if provider == "bubblewrap" else "test_image")


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
