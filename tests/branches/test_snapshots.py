"""When the states of episodes are saved, over a fake provider whose sandboxes can be saved."""

from __future__ import annotations

import errno
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import BadRequestError, LimitExceededError, NotRunnableError, SnapshotError
from decathlon_mcp.plugins.branches import saving as snapshots_module
from decathlon_mcp.plugins.branches.branches import branches_of
from decathlon_mcp.plugins.branches.states import SavedStates
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.capabilities import Snapshot
from decathlon_mcp.storage.disk import DiskSpace
from tests.branches.starting import is_exact, start_with
from tests.driver.peer import until
from tests.episodes.environment import exits_with, make_call, running_registry, suite_with
from tests.fakes.driver import FakeCall
from tests.fakes.provider import FakeSandbox, SavingFakeProvider
from tests.probe.serving import SUITE

pytestmark = pytest.mark.anyio

PLAYER = Principal()


class CountingProvider(SavingFakeProvider):
    """Counts the copies that were to be opened."""

    copies = 0

    @asynccontextmanager
    async def open(
        self, spec: SandboxSpec, *, snapshot: Snapshot | None = None
    ) -> AsyncGenerator[FakeSandbox]:
        async with super().open(spec, snapshot=snapshot) as sandbox:
            self.copies += snapshot is not None
            yield sandbox


@dataclass
class Saving:
    """What happens at a saving. `meanwhile`: awaited during it. `release`: ends slow calls."""

    registry: EpisodeRegistry
    provider: CountingProvider
    release: anyio.Event = field(default_factory=anyio.Event)
    events: list[str] = field(default_factory=list[str])
    meanwhile: Callable[[], Awaitable[object]] | None = None

    def folder(self, episode: Episode) -> Path:
        return self.registry.folder(episode.id) / "snapshots"


async def call(episode: Episode, tool: str = "echo") -> str:
    reply = (await make_call(episode, f"probe__{tool}", CallParams.of({}))).decoded()
    return reply["result"]["content"][0]["text"]


@asynccontextmanager
async def saving(
    folder: Path, patch: pytest.MonkeyPatch, *, suite: Path | str = SUITE, **settings: Any
) -> AsyncGenerator[Saving]:
    """A registry that saves states."""

    async def echo(_: FakeCall) -> str:
        return "echo"

    async def slow(_: FakeCall) -> str:
        await state.release.wait()
        return "slow"

    save = FakeSandbox.snapshot

    async def snapshot(self: FakeSandbox, folder: Path) -> Snapshot:
        state.events.append("saved")
        saved = await save(self, folder)
        if state.meanwhile is not None:
            await state.meanwhile()
        return saved

    patch.setattr(FakeSandbox, "snapshot", snapshot)
    provider = CountingProvider(tools={"probe": {"echo": echo, "slow": slow}}, run=exits_with(0))
    async with running_registry(folder, provider, suite=suite, **settings) as registry:
        state = Saving(registry, provider)
        yield state


async def started(state: Saving, snapshots: int | None = None) -> Episode:
    episode = await start_with(state.registry, task="find-answer", snapshots=snapshots)
    await episode.ready()
    return episode


async def branched(state: Saving, source: Episode, at: int) -> Episode:
    arguments = {"branch_of": source.id, "at": at}
    made = await start_with(state.registry, PLAYER, **arguments)
    await made.ready()
    return made


async def test_a_state_is_not_saved_while_a_call_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_module, "STILL_SECONDS", 0.1)
    async with saving(tmp_path, monkeypatch) as state, anyio.create_task_group() as tasks:
        episode = await started(state)
        tasks.start_soon(call, episode, "slow")
        while not episode.calls.sent:
            await anyio.lowlevel.checkpoint()
        with pytest.raises(SnapshotError, match="a call has run for more than"):
            await branches_of(state.registry).snapshots(episode).take()
        assert state.events == []
        # Nothing is held any more.
        with anyio.fail_after(10):
            assert await call(episode) == "echo"
            state.release.set()


async def test_a_state_is_not_kept_of_an_attempt_that_was_closed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with saving(tmp_path, monkeypatch) as state:
        episode = await started(state)
        over = anyio.Event()

        async def claim() -> None:
            await episode.claim_done(None)
            over.set()

        state.meanwhile = claim
        with anyio.fail_after(10):
            await call(episode)
            with pytest.raises(BadRequestError, match="closed while its state was saved"):
                await branches_of(state.registry).snapshots(episode).take()
            await over.wait()
            assert (await episode.evaluate()).reward == 1.0
        assert state.events == ["saved"]
        assert not [path for path in state.folder(episode).iterdir() if path.name.endswith(".json")]


async def test_what_is_outside_of_a_sandbox_is_not_saved_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = suite_with(tmp_path, conflicts=[["find-answer", "made-answer"]])
    async with saving(tmp_path, monkeypatch, suite=suite) as state:
        with pytest.raises(NotRunnableError, match="outside of its sandbox: the conflict group"):
            await started(state, snapshots=1)
        episode = await started(state)
        with pytest.raises(NotRunnableError, match="outside of its sandbox: the conflict group"):
            await branches_of(state.registry).snapshots(episode).take()
        assert state.events == []


async def test_a_state_of_another_kind_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with saving(tmp_path, monkeypatch) as state:
        episode = await started(state)
        await call(episode)
        saved = await branches_of(state.registry).snapshots(episode).take()
        record = saved.folder.with_suffix(".json")
        content = json.loads(record.read_text())
        record.write_text(json.dumps({**content, "wire_version": 99}))
        made = await branched(state, episode, 1)
        assert state.provider.copies == 0
        assert not is_exact(made)
    assert "a saved state cannot be used" in caplog.text


async def test_a_state_whose_folder_cannot_be_made_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, which a neighbour can fill."""

    def refuse(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SavedStates, "prepare", refuse)
    async with saving(tmp_path, monkeypatch) as state:
        episode = await started(state, snapshots=1)
        await call(episode)
        await branches_of(state.registry).snapshots(episode).settled()
        with pytest.raises(SnapshotError, match="cannot be kept: No space left"):
            await branches_of(state.registry).snapshots(episode).take()
        assert await call(episode) == "echo"


async def test_sandboxes_that_could_fill_the_disk_are_saved_one_after_the_other_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free_bytes(_: DiskSpace) -> int:
        return (512 << 20) + 15

    monkeypatch.setattr(DiskSpace, "free_bytes", free_bytes)
    async with saving(tmp_path, monkeypatch, min_free_mib=512) as state, anyio.create_task_group() as tasks:
        episodes = [await started(state) for _ in range(3)]
        state.meanwhile = anyio.wait_all_tasks_blocked
        for episode in episodes:
            tasks.start_soon(branches_of(state.registry).snapshots(episode).take)
        await until(lambda: len(state.events) == 3)
        state.provider.saved_bytes = 16
        with pytest.raises(LimitExceededError, match="no room above `--min-free-mib`"):
            await branches_of(state.registry).snapshots(await started(state)).take()
        assert len(state.events) == 3


async def test_the_pool_gives_way_to_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is none of the pool's, and there must not be more sandboxes than the limit for long."""
    async with saving(tmp_path, monkeypatch, pool=2, max_sandboxes=3) as state:
        source = await started(state)
        await call(source)
        await branches_of(state.registry).snapshots(source).take()
        await until(lambda: state.registry.source.idle == 2)
        with anyio.fail_after(10):
            made = await branched(state, source, 1)
            assert is_exact(made)
            await until(lambda: len(state.provider.machine.sandboxes) == 3)
