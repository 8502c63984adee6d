"""The MCP conformance suites, run at every address of the server and against the fixture by itself."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conformance import expected, servers, suites
from tests.conformance.runs import RUNS, Run

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

EXPECTED = expected.load(Path(__file__).parent / "expected.yaml")


@pytest.fixture(scope="session")
def installed(pytestconfig: pytest.Config) -> Path:
    """Where the suites are installed. Without a registry of npm packages: skipped, but never in CI."""
    try:
        return suites.install(pytestconfig.cache.mkdir("conformance"))
    except suites.NotInstalledError as error:
        if os.environ.get("DECATHLON_REQUIRE_DOCKER") == "1":
            raise
        pytest.skip(f"the conformance suites cannot be installed: {error}")


@pytest.fixture(scope="module")
async def fixture() -> AsyncIterator[str]:
    async with servers.running(*servers.fixture_by_itself()) as base:
        yield base


@pytest.fixture(scope="module")
async def decathlon(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with servers.running(*servers.decathlon(tmp_path_factory.mktemp("state"))) as base:
        yield base


def complaints(run: Run, report: suites.Report) -> list[str]:
    """What speaks against this run, one sentence each."""
    found = EXPECTED.complaints(run.name, report)
    if len(report.scenarios) != run.scenarios:
        found.append(f"{len(report.scenarios)} scenarios left a result, not {run.scenarios}")
    if len(report.passed) < run.passes:
        found.append(f"{len(report.passed)} checks passed, not {run.passes}")
    return found


async def address(run: Run, base: str) -> str:
    match run.address:
        case "fixture" | "lobby":
            return f"{base}/mcp"
        case "task":
            return f"{base}/tasks/{servers.TASK}/mcp"
        case "episode":
            return await servers.start_episode(base)


async def conforms(run: Run, base: str, installed: Path, results: Path) -> None:
    report = await suites.run(installed, run.package, await address(run, base), run.arguments, results)
    found = complaints(run, report)
    assert not found, "\n".join([*found, "", "The suite's last words:", report.output[-1000:]])


@pytest.mark.parametrize("run", [run for run in RUNS if run.address == "fixture"], ids=lambda run: run.name)
async def test_the_fixture_by_itself_conforms(
    run: Run, fixture: str, installed: Path, tmp_path: Path
) -> None:
    await conforms(run, fixture, installed, tmp_path / "results")


@pytest.mark.parametrize("run", [run for run in RUNS if run.address != "fixture"], ids=lambda run: run.name)
async def test_the_server_conforms_at_every_address(
    run: Run, decathlon: str, installed: Path, tmp_path: Path
) -> None:
    await conforms(run, decathlon, installed, tmp_path / "results")


async def test_a_server_that_does_not_answer_does_not_pass(installed: Path, tmp_path: Path) -> None:
    """The newer suite passes 45 checks against one: the list and the least number must notice."""
    dead = f"http://127.0.0.1:{servers.closed_port()}/mcp"
    for number, run in enumerate(run for run in RUNS if run.address == "episode"):
        report = await suites.run(installed, run.package, dead, run.arguments, tmp_path / f"results-{number}")
        assert len(report.passed) < run.passes
        assert complaints(run, report)
