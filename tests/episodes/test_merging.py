"""Merging of pages: whose memory is merged, and the memory floor."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.plugins.regrade.kept_attempts import KeptAttempt
from decathlon_mcp.sandboxes import machine_limits
from decathlon_mcp.sandboxes.machine_limits import MemoryFloor, available_bytes
from tests.episodes.environment import TOOLS, exits_with, running_registry, suite_with
from tests.fakes.provider import FakeProvider

pytestmark = pytest.mark.anyio

PLAYER = Principal()


def merging(provider: FakeProvider) -> dict[str, tuple[bool, bool]]:
    """Whether each sandbox may merge its memory, and does, by what it was opened for."""
    return {
        sandbox.spec.name.rpartition("-")[2]: (sandbox.spec.merge_pages, sandbox.merges)
        for sandbox in provider.opened
    }


async def test_the_memory_of_agents_is_merged_and_that_of_graders_is_not(tmp_path: Path) -> None:
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(tmp_path, provider, merge_pages=True, keep="workspace") as registry:
        episode = registry.start("find-answer", PLAYER)
        verdict = await episode.evaluate()
        assert merging(provider) == {"agent": (True, True), "grader1": (False, False)}
        assert verdict.dense
        assert verdict.to_json()["dense"]
        kept = tmp_path / "state" / "episodes" / episode.id / "attempt.json"
        assert KeptAttempt.parse(json.loads(kept.read_text())).attempt.facts.dense


async def test_a_sandbox_in_which_its_task_is_graded_is_not_dense(tmp_path: Path) -> None:
    suite = suite_with(tmp_path, tasks={"find-answer": {"in_place": True}})
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(tmp_path, provider, suite=suite, merge_pages=True) as registry:
        verdict = await registry.start("find-answer", PLAYER).evaluate()
        assert verdict.in_place
        assert not verdict.dense
        assert merging(provider) == {"agent": (False, False)}


async def test_openings_wait_in_order_while_memory_is_low(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_limits, "MEMORY_INTERVAL_SECONDS", 0.01)
    available = 99
    floor = MemoryFloor(100, lambda: available)
    passed: list[int] = []

    async def wait(number: int) -> None:
        await floor.wait()
        passed.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(wait, number)
        while floor.waiting < 3:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        await anyio.sleep(0.05)
        assert passed == []
        available = 100
    assert passed == [0, 1, 2]
    assert floor.waiting == 0


async def test_an_episode_opens_when_there_is_memory_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_limits, "MEMORY_INTERVAL_SECONDS", 0.01)
    available = 0
    monkeypatch.setattr(machine_limits, "available_bytes", lambda: available)
    provider = FakeProvider(tools=TOOLS)
    monkeypatch.setattr("decathlon_mcp.app.MERGING_FLOOR_MIB", 1)
    async with running_registry(tmp_path, provider, merge_pages=True) as registry:
        episode = registry.start("find-answer", PLAYER)
        while not registry.admission.memory.waiting:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        assert provider.opened == []
        available = 1 << 20
        await episode.ready()


async def test_an_episode_ends_if_there_is_no_memory_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_limits, "MEMORY_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(machine_limits, "STALLED_SECONDS", 0.05)
    monkeypatch.setattr(machine_limits, "available_bytes", lambda: 5 << 20)
    monkeypatch.setattr("decathlon_mcp.app.MERGING_FLOOR_MIB", 6)
    async with running_registry(tmp_path, FakeProvider(tools=TOOLS), merge_pages=True) as registry:
        with pytest.raises(AtCapacityError, match=r"has 5 MiB of memory available, and needs 6") as refused:
            await registry.start("find-answer", PLAYER).ready()
        assert refused.value.retryable


def test_without_a_readable_file_the_available_memory_is_unknown(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none") is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert available_bytes(tmp_path / "meminfo") == 2 << 20
