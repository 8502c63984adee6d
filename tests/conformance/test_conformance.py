"""Runs the MCP conformance suite at each kind of the server's addresses."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from mcp import Client

from tests.conformance import suites
from tests.survival.servers import supervised_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

FOLDER = Path(__file__).parent
TASK = "everything"


@dataclass(frozen=True, slots=True)
class Run:
    """The suite for one revision at one address.

    `scenarios`: number of scenarios, each of which must leave a result. `passes`: minimum number of checks
    that must pass, because the suite passes 45 checks against a server that does not answer.
    """

    address: Literal["task", "episode", "lobby"]
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
    """Folder with the installed suite. Without an npm registry the tests are skipped, except in CI."""
    try:
        return suites.install(pytestconfig.cache.mkdir("conformance"))
    except suites.NotInstalledError as error:
        if os.environ.get("DECATHLON_REQUIRE_DOCKER") == "1":
            raise
        pytest.skip(f"the conformance suite cannot be installed: {error}")


@pytest.fixture(scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    state = tmp_path_factory.mktemp("server") / "state"
    async with supervised_server(state, "--names", "raw", suite=str(FOLDER / "suite")) as server:
        yield server.url


async def address_of(run: Run, url: str) -> str:
    if run.address == "lobby":
        return f"{url}/mcp"
    if run.address == "task":
        return f"{url}/tasks/{TASK}/mcp"
    async with Client(f"{url}/mcp") as lobby:
        started = await lobby.call_tool("start_episode", {"task": TASK})
    assert started.structured_content is not None, started.content
    return str(started.structured_content["address"])


def problems(run: Run, report: suites.Report) -> list[str]:
    """One sentence for each reason why the run fails.

    Listed failures of scenarios that the run does not have are ignored.
    """
    groups: list[Any] = yaml.safe_load((FOLDER / "expected.yaml").read_text())
    patterns: list[str] = [
        pattern
        for group in groups
        if any(fnmatchcase(run.name, names) for names in group["runs"])
        for pattern in group["checks"]
    ]
    found = [
        f"{name} failed: {message}"
        for name, message in report.failed.items()
        if not any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    found += [
        f"{pattern} is listed as an expected failure and did not fail"
        for pattern in patterns
        if any(fnmatchcase(scenario, pattern.partition("/")[0]) for scenario in report.scenarios)
        and not any(fnmatchcase(name, pattern) for name in report.failed)
    ]
    if len(report.scenarios) != run.scenarios:
        found.append(f"{len(report.scenarios)} scenarios left a result, expected {run.scenarios}")
    if len(report.passed) < run.passes:
        found.append(f"{len(report.passed)} checks passed, expected at least {run.passes}")
    return found


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
async def test_server_conforms(run: Run, url: str, installed: Path, tmp_path: Path) -> None:
    report = await suites.run(installed, await address_of(run, url), run.revision, tmp_path / "results")
    reasons = problems(run, report)
    assert not reasons, "\n".join([*reasons, "", "End of the suite's output:", report.output[-1000:]])
