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
from tests.episodes.environment import TOOLS, exits_with, running_registry
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
