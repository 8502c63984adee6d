"""Runs the MCP conformance suites at each kind of the server's addresses and against the fixture alone."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.conformance import expected, servers, suites
from tests.conformance.suites import Package

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

EXPECTED = expected.load(Path(__file__).parent / "expected.yaml")

Address = Literal["fixture", "task", "episode", "lobby"]


@dataclass(frozen=True, slots=True)
class Run:
    """One suite at one address. `expected.yaml` refers to it by `name`.

    `scenarios`: number of scenarios, each of which must leave a result. `passes`: minimum number of checks
    that must pass, because a suite can succeed against a server that does not answer.
    """

    name: str
    address: Address
    package: Package
    arguments: tuple[str, ...]
    scenarios: int
    passes: int


def runs_at(address: Address, passes: dict[str, int]) -> list[Run]:
    """The runs at an address, one for each suite in `passes`."""
    suites: dict[str, tuple[Package, tuple[str, ...], int]] = {
        "old": ("conformance-0.1", ("--suite", "all"), 32),
        "2025-11-25": ("conformance-0.2", ("--requirements", "2025-11-25"), 33),
        "2026-07-28": ("conformance-0.2", ("--requirements", "2026-07-28"), 50),
    }
    return [
        Run(f"{address}-{suite}", address, *suites[suite], passes=minimum)
        for suite, minimum in passes.items()
    ]


RUNS = (
    *runs_at("fixture", {"old": 32, "2025-11-25": 69, "2026-07-28": 129}),
    # A task's address serves only revisions with a handshake, and refuses the others as the protocol says.
    *runs_at("task", {"old": 21, "2025-11-25": 58, "2026-07-28": 73}),
    *runs_at("episode", {"old": 21, "2025-11-25": 58, "2026-07-28": 108}),
    *runs_at("lobby", {"old": 7, "2025-11-25": 41, "2026-07-28": 85}),
)


@pytest.fixture(scope="session")
def installed(pytestconfig: pytest.Config) -> Path:
    """Folder with the installed suites. Without an npm registry the tests are skipped, except in CI."""
    try:
        return suites.install(pytestconfig.cache.mkdir("conformance"))
    except suites.NotInstalledError as error:
        if os.environ.get("DECATHLON_REQUIRE_DOCKER") == "1":
            raise
        pytest.skip(f"the conformance suites cannot be installed: {error}")


@pytest.fixture(scope="module")
async def fixture() -> AsyncIterator[str]:
    async with servers.running(*servers.fixture_command()) as base:
        yield base


@pytest.fixture(scope="module")
async def decathlon(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with servers.running(*servers.decathlon_command(tmp_path_factory.mktemp("state"))) as base:
        yield base


def problems(run: Run, report: suites.Report) -> list[str]:
    """One sentence for each reason why the run fails."""
    problems = EXPECTED.problems(run.name, report)
    if len(report.scenarios) != run.scenarios:
        problems.append(f"{len(report.scenarios)} scenarios left a result, expected {run.scenarios}")
    if len(report.passed) < run.passes:
        problems.append(f"{len(report.passed)} checks passed, expected at least {run.passes}")
    return problems


async def address_of(run: Run, base: str) -> str:
    match run.address:
        case "fixture" | "lobby":
            return f"{base}/mcp"
        case "task":
            return f"{base}/tasks/{servers.TASK}/mcp"
        case "episode":
            return await servers.start_episode(base)


async def assert_conforms(run: Run, base: str, installed: Path, results: Path) -> None:
    report = await suites.run(installed, run.package, await address_of(run, base), run.arguments, results)
    reasons = problems(run, report)
    assert not reasons, "\n".join([*reasons, "", "End of the suite's output:", report.output[-1000:]])


@pytest.mark.parametrize("run", [run for run in RUNS if run.address == "fixture"], ids=lambda run: run.name)
@pytest.mark.long
async def test_fixture_by_itself_conforms(run: Run, fixture: str, installed: Path, tmp_path: Path) -> None:
    await assert_conforms(run, fixture, installed, tmp_path / "results")


@pytest.mark.parametrize(
    "run",
    [
        # What the older suite tests, the newer one tests too, in the revision that both have.
        pytest.param(run, marks=pytest.mark.long) if run.package == "conformance-0.1" else run
        for run in RUNS
        if run.address != "fixture"
    ],
    ids=lambda run: run.name,
)
async def test_server_conforms(run: Run, decathlon: str, installed: Path, tmp_path: Path) -> None:
    await assert_conforms(run, decathlon, installed, tmp_path / "results")


@pytest.mark.long
async def test_server_that_does_not_answer_does_not_conform(installed: Path, tmp_path: Path) -> None:
    # The newer suite passes 45 checks against such a server; the expected numbers must catch that.
    dead = f"http://127.0.0.1:{servers.closed_port()}/mcp"
    for number, run in enumerate(run for run in RUNS if run.address == "episode"):
        report = await suites.run(installed, run.package, dead, run.arguments, tmp_path / f"results-{number}")
        assert len(report.passed) < run.passes
        assert problems(run, report)
