"""Limits on what goes on at once: openings, graders and set-ups do not wait for each other."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.sandboxes.base import SandboxSpec
from tests.episodes.environment import TOOLS, ended, exits_with, running_registry
from tests.fakes.driver import Faults
from tests.fakes.provider import FakeProvider

pytestmark = pytest.mark.anyio

PLAYER = Principal()
BOUND_SECONDS = 60


async def play(registry: EpisodeRegistry, task: str, rewards: list[float | None]) -> None:
    episode = registry.start(task, PLAYER)
    rewards.append((await episode.evaluate()).reward)
    episode.close()
    await ended(episode)


async def test_limits_of_one_do_not_block_each_other(tmp_path: Path) -> None:
    """With and without preprocess, so that an episode needs one sandbox or two to open."""
    rewards: list[float | None] = []
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    with anyio.fail_after(BOUND_SECONDS):
        async with (
            running_registry(tmp_path, provider, max_sandboxes=2, max_opening=1) as registry,
            anyio.create_task_group() as players,
        ):
            for task in ("find-answer", "made-answer") * 2:
                players.start_soon(play, registry, task, rewards)
    assert rewards == [1.0] * 4


async def test_grader_does_not_wait_for_openings(tmp_path: Path) -> None:
    slow = False

    def faults(spec: SandboxSpec) -> Faults:
        return Faults(open_seconds=1000 if slow and "grader" not in spec.name else 0)

    provider = FakeProvider(tools=TOOLS, run=exits_with(0), faults=faults)
    with anyio.fail_after(BOUND_SECONDS):
        async with running_registry(tmp_path, provider, max_opening=1) as registry:
            episode = registry.start("find-answer", PLAYER)
            await episode.state.reach(Phase.READY)
            slow = True
            waiting = [registry.start("find-answer", PLAYER) for _ in range(2)]
            assert (await episode.evaluate()).reward == 1.0
            for each in (episode, *waiting):
                each.close()
                await ended(each)
