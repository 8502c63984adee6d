"""Failures of a sandbox after the claim, at every step: the verdict says whose they are."""

from __future__ import annotations

import errno
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.episodes import grading
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import DriverError, ProviderUnavailableError
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.capabilities import Usage
from tests.episodes.environment import TOOLS, exits_with, running_registry
from tests.fakes.driver import Faults
from tests.fakes.provider import FakeProvider, FakeSandbox

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ERRORS: list[Exception] = [
    ProviderUnavailableError("a command in the sandbox took over 600 s"),
    ProviderUnavailableError("the engine could not stop the processes of a sandbox"),
    DriverError("broken", reason="files"),
    MemoryError(),
]
AGENTS, GRADERS, FIRST_GRADER = "-agent$", "-grader", "-grader1$"
"""Patterns of sandboxes' names."""


async def verdict_of(tmp_path: Path, faults: Faults, pattern: str = "") -> Verdict:
    """Of an attempt whose sandboxes with names of this pattern have faults."""
    provider = FakeProvider(
        tools=TOOLS,
        run=exits_with(0),
        faults=lambda spec: faults if re.search(pattern, spec.name) else Faults(),
    )
    async with running_registry(tmp_path, provider) as registry:
        return await registry.start("find-answer", Principal()).evaluate()


STEPS = [*(("get_error", error) for error in ERRORS), ("pause_error", ERRORS[0])]


@pytest.mark.parametrize(("step", "error"), STEPS, ids=repr)
async def test_capture_that_fails_alone_is_forfeited(tmp_path: Path, error: Exception, step: str) -> None:
    verdict = await verdict_of(tmp_path, replace(Faults(), **{step: error}), AGENTS)
    assert (verdict.status, verdict.reward) == ("forfeited", 0.0)
    assert "(a control sandbox worked)" in verdict.detail


@pytest.mark.parametrize(("step", "error"), STEPS, ids=repr)
async def test_capture_that_fails_everywhere_gives_no_reward(
    tmp_path: Path, error: Exception, step: str
) -> None:
    verdict = await verdict_of(tmp_path, replace(Faults(), **{step: error}))
    assert verdict.status in ("not_evaluated", "sandbox_lost")
    assert verdict.reward is None
    assert "(a control sandbox failed too, and this one is not over its share)" in verdict.detail


async def test_capture_that_fails_everywhere_for_memory_is_forfeited(tmp_path: Path) -> None:
    faults = Faults(get_error=ProviderUnavailableError("no"), usage=Usage(memory=0.99))
    verdict = await verdict_of(tmp_path, faults)
    assert (verdict.status, verdict.reward) == ("forfeited", 0.0)
    assert "over its share of memory" in verdict.detail


async def test_capture_whose_machine_has_a_broken_disk_gives_no_reward(tmp_path: Path) -> None:
    verdict = await verdict_of(tmp_path, Faults(get_error=OSError(errno.EIO, "Input/output error")), AGENTS)
    assert (verdict.status, verdict.reward) == ("sandbox_lost", None)
    assert "the server's disk failed" in verdict.detail


async def test_workspace_that_takes_too_long_to_copy_is_forfeited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the provider, and even if a control sandbox would fail."""
    monkeypatch.setattr(grading, "COPY_SECONDS", 0.0)
    verdict = await verdict_of(tmp_path, Faults())
    assert (verdict.status, verdict.reward) == ("forfeited", 0.0)
    assert "(it exceeded its limit of seconds)" in verdict.detail


LATE_ERRORS = [error for error in ERRORS if not isinstance(error, DriverError)]


@pytest.fixture
def large_archives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives for graders go through the provider, as those of large workspaces."""
    monkeypatch.setattr("decathlon_mcp.driver.archives.SENT_BYTES", 0)


@pytest.mark.parametrize("error", LATE_ERRORS, ids=repr)
@pytest.mark.usefixtures("large_archives")
async def test_workspace_that_no_grader_takes_is_forfeited(tmp_path: Path, error: Exception) -> None:
    verdict = await verdict_of(tmp_path, Faults(put_error=error), GRADERS)
    assert (verdict.status, verdict.reward) == ("forfeited", 0.0)
    assert "(a control sandbox worked)" in verdict.detail


@pytest.mark.usefixtures("large_archives")
async def test_workspace_that_the_second_grader_takes_is_graded(tmp_path: Path) -> None:
    faults = Faults(put_error=ProviderUnavailableError("the engine was silent"))
    verdict = await verdict_of(tmp_path, faults, FIRST_GRADER)
    assert (verdict.status, verdict.reward) == ("scored", 1.0)


@pytest.mark.usefixtures("large_archives")
async def test_workspace_that_nothing_takes_gives_no_reward(tmp_path: Path) -> None:
    faults = Faults(put_error=ProviderUnavailableError("the engine was silent"))
    verdict = await verdict_of(tmp_path, faults, f"{GRADERS}|^control")
    assert (verdict.status, verdict.reward) == ("not_evaluated", None)
    assert "a control sandbox failed too" in verdict.detail


async def test_capture_that_fails_while_another_episode_opens_is_forfeited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No control sandbox is needed then."""

    def faults(spec: SandboxSpec) -> Faults:
        return Faults(open_error=ProviderUnavailableError("no")) if "control" in spec.name else Faults()

    provider = FakeProvider(tools=TOOLS, run=exits_with(0), faults=faults)
    async with running_registry(tmp_path, provider) as registry:
        first = registry.start("find-answer", Principal())
        await first.ready()
        get = FakeSandbox.get

        async def fail(self: FakeSandbox, *arguments: Any) -> None:
            if self.spec.name.startswith(first.public_id):
                await registry.start("find-answer", Principal()).ready()
                raise ProviderUnavailableError("the engine was silent")
            await get(self, *arguments)

        monkeypatch.setattr(FakeSandbox, "get", fail)
        verdict = await first.evaluate()
    assert (verdict.status, verdict.reward) == ("forfeited", 0.0)
    assert "(sandboxes of other episodes worked meanwhile)" in verdict.detail
