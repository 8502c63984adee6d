"""Failures of a sandbox after the claim, at every step: the verdict says whose they are."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from decathlon_mcp.episodes import grading
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import DriverError, ProviderUnavailableError
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.sandboxes.capabilities import Usage
from tests.episodes.environment import TOOLS, exits_with, running_registry
from tests.fakes.driver import Faults
from tests.fakes.provider import FakeProvider

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SILENT = ProviderUnavailableError("the engine was silent")
AGENTS, GRADERS, FIRST_GRADER = "-agent$", "-grader", "-grader1$"
"""Patterns of sandboxes' names."""
FORFEITED = ("forfeited", 0.0, "(a control sandbox worked)")
NOT_EVALUATED = ("not_evaluated", None, "a control sandbox failed too")
CASES: dict[str, tuple[Faults, str, tuple[str, float | None, str]]] = {
    "capture": (Faults(get_error=SILENT), AGENTS, FORFEITED),
    "capture, driver": (Faults(get_error=DriverError("broken", reason="files")), AGENTS, FORFEITED),
    "pause": (Faults(pause_error=SILENT), AGENTS, FORFEITED),
    "capture everywhere": (Faults(get_error=SILENT), "", NOT_EVALUATED),
    "pause everywhere": (Faults(pause_error=SILENT), "", NOT_EVALUATED),
    "capture everywhere, for memory": (
        Faults(get_error=SILENT, usage=Usage(memory=0.99)),
        "",
        ("forfeited", 0.0, "over its share of memory"),
    ),
    "broken disk": (
        Faults(get_error=OSError(errno.EIO, "Input/output error")),
        AGENTS,
        ("sandbox_lost", None, "the server's disk failed"),
    ),
    "no grader takes it": (Faults(put_error=SILENT), GRADERS, FORFEITED),
    "the second grader takes it": (Faults(put_error=SILENT), FIRST_GRADER, ("scored", 1.0, "")),
    "nothing takes it": (Faults(put_error=SILENT), f"{GRADERS}|^control", NOT_EVALUATED),
}


async def verdict_of(tmp_path: Path, faults: Faults, pattern: str = "") -> Verdict:
    """Of an attempt whose sandboxes with names of this pattern have faults."""
    provider = FakeProvider(
        tools=TOOLS,
        run=exits_with(0),
        faults=lambda spec: faults if re.search(pattern, spec.name) else Faults(),
    )
    async with running_registry(tmp_path, provider) as registry:
        return await registry.start("find-answer", Principal()).evaluate()


@pytest.mark.parametrize(("faults", "pattern", "expected"), CASES.values(), ids=CASES)
async def test_a_failure_is_the_agents_unless_other_sandboxes_fail_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
    pattern: str,
    expected: tuple[str, float | None, str],
) -> None:
    # Archives for graders go through the provider, as those of large workspaces.
    monkeypatch.setattr("decathlon_mcp.driver.transfers.SENT_BYTES", 0)
    verdict = await verdict_of(tmp_path, faults, pattern)
    assert (verdict.status, verdict.reward) == expected[:2]
    assert expected[2] in verdict.detail


async def test_workspace_that_takes_too_long_to_copy_is_forfeited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the provider, and even if a control sandbox would fail."""
    monkeypatch.setattr(grading, "COPY_SECONDS", 0.0)
    verdict = await verdict_of(tmp_path, Faults())
    assert (verdict.status, verdict.reward) == ("forfeited", 0.0)
    assert "(it exceeded its limit of seconds)" in verdict.detail
