"""A state folder on a small file system that becomes full."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.driver.replies import CallParams, Reply
from decathlon_mcp.episodes import calls as calls_module
from decathlon_mcp.episodes import grading as grading_module
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import AtCapacityError, DecathlonError, DiskFullError, EpisodeClaimedError
from decathlon_mcp.http.health import ServerState, server_state
from decathlon_mcp.sandboxes.capabilities import Usage
from decathlon_mcp.storage.disk import DiskSpace
from tests.disks import failing_disk, small_disk
from tests.driver.peer import until
from tests.episodes.environment import ended, exits_with, make_call, running_registry
from tests.fakes.driver import FakeCall, Faults
from tests.fakes.provider import FakeProvider

pytestmark = pytest.mark.anyio

DISK_MIB = 24
FLOOR_MIB = 12
CLIENT = Principal()


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """A file system of DISK_MIB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_disk(folder, DISK_MIB):
        yield folder


async def big(call: FakeCall) -> str:
    return "x" * (2 << 20)


async def small(call: FakeCall) -> str:
    return "fine"


TOOLS = {"probe": {"big": big, "small": small}}


def fill(disk: Path) -> None:
    """Leave not a single block free."""
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    assert DiskSpace(disk, 0).free_bytes() == 0


async def test_neighbour_that_fills_the_disk_does_not_take_the_honest_verdict(disk: Path) -> None:
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(disk, provider, min_free_mib=FLOOR_MIB) as registry:
        honest = registry.start("find-answer", CLIENT)
        neighbour = registry.start("find-answer", CLIENT)
        await make_call(honest, "probe__small", CallParams.of({}))
        calls = 0
        while neighbour.claim is None:
            # A call that cannot be logged is not sent.
            with suppress(EpisodeClaimedError):
                await make_call(neighbour, "probe__big", CallParams.of({}))
                calls += 1
        assert calls <= DISK_MIB // 2
        assert neighbour.claim.truncated_by == "log"
        with pytest.raises(AtCapacityError, match="disk is nearly full") as refused:
            registry.start("find-answer", CLIENT)
        assert refused.value.data["retryAfterSeconds"] == 60.0
        await make_call(honest, "probe__small", CallParams.of({}))
        verdict = await honest.evaluate()
        assert (verdict.status, verdict.reward, verdict.truncated) == ("scored", 1.0, False)
        assert verdict.metrics["calls"] == 2
        assert (await neighbour.evaluate()).truncated
        file = disk / "state" / "episodes" / honest.id / "verdict.json"
        assert json.loads(file.read_text())["reward"] == 1.0


async def test_verdict_is_kept_on_a_disk_without_a_free_block(disk: Path) -> None:
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(disk, provider, min_free_mib=0) as registry:
        episode = registry.start("find-answer", CLIENT)
        await make_call(episode, "probe__small", CallParams.of({}))
        fill(disk)
        episode.close()
        await ended(episode)
        assert episode.state.ending is Ending.CLOSED
        kept = json.loads((disk / "state" / "episodes" / episode.id / "verdict.json").read_text())
        assert kept["metrics"]["calls"] == 1
        assert episode.verdict is not None
        assert kept == episode.verdict.to_json()
        with pytest.raises(AtCapacityError, match="state folder"):
            registry.start("find-answer", CLIENT)
        assert sum(1 for _ in (disk / "state" / "episodes").iterdir()) == 1


def why_not_ready(registry: EpisodeRegistry) -> str:
    """Why `/readyz` has 503."""
    assert server_state(registry)[0] is ServerState.UNWRITABLE
    reason = registry.why_unwritable()
    assert reason is not None
    return reason


async def test_attempt_goes_on_when_a_full_disk_has_space_again(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "UNWRITTEN_SECONDS", 0.05)
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(disk, provider, min_free_mib=0) as registry:
        episode = registry.start("find-answer", CLIENT)
        await episode.ready()
        fill(disk)
        # More than there is room for in the trajectory's last block.
        with pytest.raises(DiskFullError, match=r"No space left.*; the call was not sent") as refused:
            await make_call(episode, "probe__small", CallParams.of({"text": "x" * 10_000}))
        assert refused.value.retryable
        sent = episode.calls.sent
        assert (episode.state.phase, episode.claim) == (Phase.READY, None)
        assert "No space left" in why_not_ready(registry)
        (disk / "filler").unlink()
        await make_call(episode, "probe__small", CallParams.of({}))
        assert registry.why_unwritable() is None
        verdict = await episode.evaluate()
        assert (verdict.status, verdict.reward, verdict.truncated) == ("scored", 1.0, False)
        assert verdict.metrics["calls"] == sent + 1


async def test_reply_that_comes_while_the_disk_is_full_is_held(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "UNWRITTEN_SECONDS", 0.05)

    async def fills(call: FakeCall) -> str:
        fill(disk)
        return "x" * 10_000

    provider = FakeProvider(tools={"probe": {"fills": fills}}, run=exits_with(0))
    async with (
        running_registry(disk, provider, min_free_mib=0) as registry,
        anyio.create_task_group() as tasks,
    ):
        episode = registry.start("find-answer", CLIENT)
        await episode.ready()
        replies: list[Reply] = []

        async def call() -> None:
            replies.append(await make_call(episode, "probe__fills", CallParams.of({})))

        tasks.start_soon(call)
        await until(lambda: (disk / "filler").exists() and DiskSpace(disk, 0).free_bytes() == 0)
        await anyio.sleep(0.15)
        assert replies == []
        assert episode.state.phase is Phase.READY
        (disk / "filler").unlink()
        await until(lambda: bool(replies))
        assert b"x" * 10_000 in (replies[0].result or b"")
        verdict = await episode.evaluate()
        assert (verdict.reward, verdict.metrics["calls"], verdict.metrics["failed_calls"]) == (1.0, 1.0, 0.0)


async def test_episode_ends_although_a_reply_is_held(disk: Path) -> None:
    async def fills(call: FakeCall) -> str:
        fill(disk)
        return "x" * 10_000

    provider = FakeProvider(tools={"probe": {"fills": fills}}, run=exits_with(0))
    async with (
        running_registry(disk, provider, min_free_mib=0) as registry,
        anyio.create_task_group() as tasks,
    ):
        episode = registry.start("find-answer", CLIENT)
        await episode.ready()
        failures: list[DecathlonError] = []

        async def call() -> None:
            try:
                await make_call(episode, "probe__fills", CallParams.of({}))
            except DecathlonError as error:
                failures.append(error)

        tasks.start_soon(call)
        await until(lambda: (disk / "filler").exists() and DiskSpace(disk, 0).free_bytes() == 0)
        episode.close()
        with anyio.fail_after(10):
            await ended(episode)
        await until(lambda: bool(failures))


async def test_disk_that_turns_read_only_ends_no_attempt(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    with failing_disk(folder) as fail:
        async with running_registry(folder, provider, min_free_mib=0, drain_seconds=0.1) as registry:
            episodes = [registry.start("find-answer", CLIENT) for _ in range(2)]
            for episode in episodes:
                await episode.ready()
            fail()
            for episode in episodes:
                with pytest.raises(DiskFullError, match="Read-only file system"):
                    await make_call(episode, "probe__small", CallParams.of({}))
                assert episode.state.phase is Phase.READY
            assert "Read-only file system" in why_not_ready(registry)
            with pytest.raises(AtCapacityError, match="Read-only file system"):
                registry.start("find-answer", CLIENT)
            await episodes[0].claim_done("the answer")
            await until_it_waits(episodes[0])
    assert [episode.verdict is not None for episode in episodes] == [True, True], "each has ended"


async def until_it_waits(episode: Episode) -> None:
    await until(lambda: episode.waits_for == "space on the server's disk")


async def test_attempts_that_are_claimed_on_a_full_disk_are_graded_once_there_is_space(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading_module, "ROOM_RETRY_SECONDS", 0.1)
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(disk, provider, min_free_mib=0) as registry:
        episodes = [registry.start("find-answer", CLIENT) for _ in range(3)]
        for episode in episodes:
            await make_call(episode, "probe__small", CallParams.of({}))
        fill(disk)
        for episode in episodes:
            await episode.claim_done("the answer")
        for episode in episodes:
            await until_it_waits(episode)
        (disk / "filler").unlink()
        with anyio.fail_after(60):
            verdicts = [await episode.evaluate() for episode in episodes]
        assert [(verdict.status, verdict.reward) for verdict in verdicts] == [("scored", 1.0)] * 3
        assert [episode.waits_for for episode in episodes] == [None] * 3


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (Usage(disk=3.0), ("forfeited", 0.0, "over its share of disk")),
        (Usage(memory=1.0), ("not_evaluated", None, "there is no room for the workspace")),
    ],
)
async def test_attempt_that_has_taken_the_disk_itself_is_forfeited_when_it_was_waited_for(
    disk: Path, monkeypatch: pytest.MonkeyPatch, usage: Usage, expected: tuple[str, float | None, str]
) -> None:
    monkeypatch.setattr(grading_module, "ROOM_SECONDS", 0.0)
    provider = FakeProvider(tools=TOOLS, run=exits_with(0), faults=lambda spec: Faults(usage=usage))
    async with running_registry(disk, provider, min_free_mib=0) as registry:
        episode = registry.start("find-answer", CLIENT)
        await episode.ready()
        fill(disk)
        verdict = await episode.evaluate()
        assert (verdict.status, verdict.reward) == expected[:2]
        assert expected[2] in verdict.detail


@pytest.mark.parametrize("is_full", [False, True])
async def test_workspace_over_its_limit_is_forfeited_although_the_disk_has_no_room_for_it(
    disk: Path, is_full: bool
) -> None:
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(disk, provider, min_free_mib=0, workspace_mib=DISK_MIB + 1) as registry:
        episode = registry.start("find-answer", CLIENT)
        await episode.ready()
        (sandbox,) = provider.machine.sandboxes.values()
        sparse = sandbox.root / episode.sandbox_factory.suite.profile.workspace / "sparse"
        sandbox.tree.write(sparse, "")
        os.truncate(sandbox.tree.place(sparse), 1 << 40)
        if is_full:
            fill(disk)
        with anyio.fail_after(60):
            verdict = await episode.evaluate()
        assert (verdict.status, verdict.reward) == ("forfeited", 0.0), verdict
        assert "it exceeded its limit of bytes" in verdict.detail


async def test_attempt_is_graded_although_the_disk_is_full_when_its_grading_begins(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading_module, "ROOM_RETRY_SECONDS", 0.1)
    note = Episode.note

    def note_and_fill(episode: Episode, **changes: Any) -> None:
        note(episode, **changes)
        if changes.get("captured"):
            fill(disk)

    monkeypatch.setattr(Episode, "note", note_and_fill)
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(disk, provider, min_free_mib=0) as registry:
        episode = registry.start("find-answer", CLIENT)
        await episode.ready()
        await episode.claim_done("the answer")
        await until_it_waits(episode)
        (disk / "filler").unlink()
        with anyio.fail_after(60):
            assert (await episode.evaluate()).reward == 1.0
