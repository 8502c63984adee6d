"""One server for all tests of a module, for each provider."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.probe.clients import ADDRESS_KINDS, AddressKind
from tests.probe.serving import Served, serving

ON_DOCKER = (
    "test_the_right_answer_is_rewarded_with_one",
    "test_the_agent_finds_no_answers_in_its_sandbox",
    "test_grading_uses_the_files_that_preprocess_made",
    "test_a_server_that_dies_fails_its_call_with_its_stderr",
    "test_an_attempt_whose_evaluator_breaks_is_forfeited",
    "test_a_changed_evaluator_changes_the_verdict_and_back",
)
"""The tests of episodes and of regrading that run on Docker too; the conformance suite compares providers."""


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make test-long` what sandboxes know nothing of, on Docker."""
    for item in items:
        parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("provider") == "docker" and (
            parameters.get("address") in ADDRESS_KINDS[1:]
            or item.path.name in ("test_stdio.py", "test_shutdown.py")
            or (
                item.path.name in ("test_episode.py", "test_regrading.py")
                and not item.name.startswith(ON_DOCKER)
            )
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
