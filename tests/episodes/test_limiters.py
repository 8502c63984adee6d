"""Limits on what goes on at once: openings, graders and set-ups do not wait for each other."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from decathlon_mcp.episodes.admission import CAPTURES_PER_OPENING, SET_UPS_PER_OPENING, Admission
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.machine_limits import MemoryFloor
from tests.episodes.environment import TOOLS, ended, exits_with, running_registry
from tests.fakes.driver import Faults
from tests.fakes.provider import FakeProvider, FakeSandbox

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


async def test_sandbox_is_created_while_another_driver_starts(tmp_path: Path) -> None:
    specs: list[str] = []

    def faults(spec: SandboxSpec) -> Faults:
        specs.append(spec.name)
        return Faults(never_ready=len(specs) == 1)

    provider = FakeProvider(tools=TOOLS, faults=faults)
    with anyio.fail_after(BOUND_SECONDS):
        async with running_registry(tmp_path, provider, max_opening=1) as registry:
            first = registry.start("find-answer", PLAYER)
            while not specs:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            second = registry.start("find-answer", PLAYER)
            await second.state.reach(Phase.READY)
            assert first.state.phase is Phase.OPENING
            for episode in (first, second):
                episode.close()
                await ended(episode)


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


async def test_attempts_that_are_claimed_at_once_are_captured_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the end of their processes to that of their sandbox, before which no grader's has to wait."""
    closing, most, release = 0, 0, anyio.Event()
    finish = FakeSandbox.end

    async def wait(sandbox: FakeSandbox) -> None:
        nonlocal closing, most
        if sandbox.spec.name.endswith("-agent"):
            closing += 1
            most = max(most, closing)
            await release.wait()
            closing -= 1
        await finish(sandbox)

    monkeypatch.setattr(FakeSandbox, "end", wait)
    count, rewards = CAPTURES_PER_OPENING + 1, list[float | None]()
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    with anyio.fail_after(BOUND_SECONDS):
        async with (
            running_registry(tmp_path, provider, max_sandboxes=count, max_opening=1) as registry,
            anyio.create_task_group() as players,
        ):
            for _ in range(count):
                players.start_soon(play, registry, "find-answer", rewards)
            while closing < CAPTURES_PER_OPENING:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            await anyio.wait_all_tasks_blocked()
            release.set()
    assert most == CAPTURES_PER_OPENING
    assert rewards == [1.0] * count


async def test_servers_start_a_few_at_a_time_and_not_while_memory_is_low() -> None:
    available_mib = 0
    memory = MemoryFloor(1 << 20, lambda: available_mib << 20)
    admission = Admission(max_sandboxes=64, max_opening=1, max_queue=0, memory=memory)
    starting, release = 0, anyio.Event()

    async def start() -> None:
        nonlocal starting
        async with admission.starting_server():
            starting += 1
            await release.wait()

    with anyio.fail_after(BOUND_SECONDS):
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(start)
            await anyio.wait_all_tasks_blocked()
            assert starting == 0
            available_mib = 2
            while starting < SET_UPS_PER_OPENING:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            await anyio.wait_all_tasks_blocked()
            assert starting == SET_UPS_PER_OPENING
            release.set()
    assert starting == 5
