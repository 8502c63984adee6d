"""Runs the MCP conformance suite at each kind of the server's addresses."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.conformance import expected, servers, suites

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

EXPECTED = expected.load(Path(__file__).parent / "expected.yaml")

Address = Literal["task", "episode", "lobby"]


@dataclass(frozen=True, slots=True)
class Run:
    """The suite for one revision at one address.

    `scenarios`: number of scenarios, each of which must leave a result. `passes`: minimum number of checks
    that must pass, because the suite passes 45 checks against a server that does not answer.
    """

    address: Address
    revision: str
    scenarios: int
    passes: int

    @property
    def name(self) -> str:
        """As in `expected.yaml`."""
        return f"{self.address}-{self.revision}"


RUNS = (
    # A task's address serves only revisions with a handshake.
    Run("task", "2025-11-25", 33, 58),
    Run("episode", "2025-11-25", 33, 58),
    Run("episode", "2026-07-28", 50, 108),
    Run("lobby", "2026-07-28", 50, 85),
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
        case "lobby":
            return f"{base}/mcp"
        case "task":
            return f"{base}/tasks/{servers.TASK}/mcp"
        case "episode":
            return await servers.start_episode(base)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
async def test_server_conforms(run: Run, decathlon: str, installed: Path, tmp_path: Path) -> None:
    address = await address_of(run, decathlon)
    report = await suites.run(installed, address, run.revision, tmp_path / "results")
    reasons = problems(run, report)
    assert not reasons, "\n".join([*reasons, "", "End of the suite's output:", report.output[-1000:]])
