"""One server for all tests of a module, for each provider."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.probe.clients import ADDRESS_KINDS, AddressKind
from tests.probe.serving import Served, serving

REGRADED_ON_DOCKER = "test_a_changed_evaluator_changes_the_verdict_and_back"


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make test-long` what sandboxes know nothing of, on Docker.

    These are the other kinds of address, stdio, the end of a server, and what is graded again, but for one.
    """
    for item in items:
        parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("provider") == "docker" and (
            parameters.get("address") in ADDRESS_KINDS[1:]
            or item.path.name in ("test_stdio.py", "test_shutdown.py")
            or (item.path.name == "test_regrading.py" and not item.name.startswith(REGRADED_ON_DOCKER))
        ):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module", params=["host", pytest.param("docker", marks=pytest.mark.docker)])
def provider(request: pytest.FixtureRequest) -> str:
    if request.param == "docker":
        request.getfixturevalue("test_image")
    return request.param


@pytest.fixture(scope="module")
async def served(
    provider: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[Served]:
    state: Path = tmp_path_factory.mktemp("state")
    async with serving(state, provider=provider, isolation="auto") as served:
        yield served


@pytest.fixture(
    params=[ADDRESS_KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in ADDRESS_KINDS[1:])]
)
def address(request: pytest.FixtureRequest) -> AddressKind:
    """Each kind of address that serves an episode's tools."""
    return request.param
