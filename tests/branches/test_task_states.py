"""Tasks that are set up once, over the fake provider: who saves, who waits, and what is not shared."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import SetUpError, SnapshotError
from decathlon_mcp.plugins.branches import prepared as task_states
from decathlon_mcp.sandboxes.capabilities import Snapshot
from tests.branches.starting import start_with
from tests.driver.peer import until
from tests.episodes.environment import ended, make_call, running_registry, suite_with
from tests.fakes.driver import FakeCall, FakeRun, Faults, RunReply
from tests.fakes.provider import FakeSandbox, SavingFakeProvider

pytestmark = pytest.mark.anyio

PLAYER = Principal()
WHEN = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


async def write(call: FakeCall) -> str:
    call.tree.write("/note", call.arguments["text"])
    return "written"


async def read(call: FakeCall) -> str:
    return call.tree.text("/note") if "/note" in call.tree else "nothing"


class Machine:
    """A provider that counts the runs of preprocess; each may wait or fail."""

    def __init__(self, **options: Any) -> None:
        self.preprocessed = 0
        self.release: anyio.Event | None = None
        self.reply: int | RunReply = 0
        self.provider = SavingFakeProvider(
            tools={"probe": {"write": write, "read": read}}, run=self._run, **options
        )

    async def _run(self, request: FakeRun) -> int | RunReply:
        if "preprocess" not in " ".join(request.argv):
            return 0
        self.preprocessed += 1
        if self.release is not None:
            await self.release.wait()
        return self.reply

    async def has_begun(self, count: int) -> None:
        """Wait until preprocess has begun so many times."""
        await until(lambda: self.preprocessed >= count)

    @asynccontextmanager
    async def registry(self, folder: Path, **settings: Any) -> AsyncGenerator[EpisodeRegistry]:
        values: dict[str, Any] = {"prepared": True, **settings}
        async with running_registry(folder, self.provider, **values) as registry:
            yield registry


def start(registry: EpisodeRegistry, when: datetime | None = WHEN, task: str = "made-answer") -> Episode:
    return registry.start(task, PLAYER, launch_time=when)


def saved(folder: Path, name: str = "") -> list[Path]:
    return list((folder / "scratch" / task_states.PREPARED_FOLDER).glob(f"*/{name}"))


async def call(episode: Episode, tool: str, **arguments: Any) -> str:
    reply = (await make_call(episode, f"probe__{tool}", CallParams.of(arguments))).decoded()
    return reply["result"]["content"][0]["text"]


async def prepared(episode: Episode) -> bool:
    await episode.ready()
    return episode.records.progress.facts.prepared


async def test_episodes_that_come_at_once_are_set_up_once(tmp_path: Path) -> None:
    machine = Machine()
    async with machine.registry(tmp_path) as registry:
        episodes = [start(registry) for _ in range(5)]
        assert [await prepared(episode) for episode in episodes].count(True) == 4
        assert machine.preprocessed == 1
        assert machine.provider.starts == ["probe"]
        for number, episode in enumerate(episodes):
            assert await call(episode, "read") == "nothing"
            await call(episode, "write", text=f"of {number}")
        for number, episode in enumerate(episodes):
            assert await call(episode, "read") == f"of {number}"
        # What was played is in no state.
        assert await call(start(registry), "read") == "nothing"
        for episode in episodes:
            shown = (await episode.evaluate()).to_json().get("prepared")
            assert shown is (True if episode.records.progress.facts.prepared else None)


async def test_only_episodes_with_the_same_launch_time_and_task_share_a_state(tmp_path: Path) -> None:
    machine = Machine()
    async with machine.registry(tmp_path) as registry:
        assert not await prepared(start(registry))
        assert await prepared(start(registry))
        for other in (
            start(registry, WHEN + timedelta(seconds=1)),
            start(registry, task="find-answer"),
            # The present time, which no other episode has.
            start(registry, None),
            start(registry, None),
        ):
            assert not await prepared(other)
        # The same moment, which the prompt shows in the sandboxes' time zone.
        assert await prepared(start(registry, WHEN.astimezone(timezone(timedelta(hours=1)))))
        assert await prepared(start(registry, WHEN + timedelta(seconds=1)))
        # One that others branch from chooses their launch time.
        source = start(registry, None)
        await call(source, "write", text="first")
        made = await start_with(registry, branch_of=source.id, at=1)
        assert not await prepared(made)
        again = await start_with(registry, branch_of=source.id, at=1)
        assert await prepared(again)
        assert await call(again, "read") == "first"
        verdict = await again.evaluate()
        assert "exact" not in verdict.to_json()["branch"]  # the call was made again


async def test_a_changed_suite_is_set_up_again(tmp_path: Path) -> None:
    suite = suite_with(tmp_path)
    machine = Machine()
    async with machine.registry(tmp_path, suite=suite) as registry:
        await start(registry).ready()
        assert await prepared(start(registry))
        (suite / "tasks/probe/made-answer/docs/task.md").write_text("Another task.")
        changed = start(registry)
        assert not await prepared(changed)
        assert await prepared(start(registry))


async def test_other_credentials_are_another_state(tmp_path: Path) -> None:
    suite = suite_with(tmp_path, servers={"probe": {"files": {"/etc/probe.key": "keys/probe"}}})
    (suite / "keys").mkdir()
    (suite / "keys/probe").write_text("first")
    async with Machine().registry(tmp_path, suite=suite) as registry:
        assert [await prepared(start(registry)) for _ in range(2)] == [False, True]
        (suite / "keys/probe").write_text("second")
        assert [await prepared(start(registry)) for _ in range(2)] == [False, True]


async def test_the_next_one_is_set_up_if_the_first_ends_early(tmp_path: Path) -> None:
    machine = Machine()
    machine.release = anyio.Event()
    async with machine.registry(tmp_path) as registry:
        first = start(registry)
        await machine.has_begun(1)
        others = [start(registry) for _ in range(3)]
        await anyio.wait_all_tasks_blocked()
        assert machine.preprocessed == 1
        first.close()
        await ended(first)
        machine.release.set()
        assert sorted([await prepared(episode) for episode in others]) == [False, True, True]
        assert machine.preprocessed == 2


async def test_nothing_is_left_of_a_saving_that_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, snapshot = anyio.Event(), FakeSandbox.snapshot

    async def hang(sandbox: FakeSandbox, folder: Path) -> Snapshot:
        result = await snapshot(sandbox, folder)
        if not saving.is_set():
            saving.set()
            await anyio.sleep_forever()
        return result

    monkeypatch.setattr(FakeSandbox, "snapshot", hang)
    async with Machine().registry(tmp_path) as registry:
        first = start(registry)
        await saving.wait()
        assert len(saved(tmp_path)) == 1
        first.close()
        await ended(first)
        assert saved(tmp_path) == []
        assert [await prepared(start(registry)) for _ in range(2)] == [False, True]


async def test_what_fails_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    machine.reply = RunReply(exit_code=1, stderr="no luck")
    async with machine.registry(tmp_path) as registry:
        first = start(registry)
        with pytest.raises(SetUpError, match="no luck"):
            await first.ready()
        # These do not wait for each other, although the first of them could be saved.
        machine.reply, machine.release = 0, anyio.Event()
        others = [start(registry) for _ in range(3)]
        await machine.has_begun(4)
        machine.release.set()
        assert [await prepared(episode) for episode in others] == [False] * 3
        monkeypatch.setattr(task_states, "RETRY_SECONDS", 0.0)
        machine.reply = RunReply(exit_code=1)
        with pytest.raises(SetUpError):
            await start(registry, WHEN + timedelta(seconds=1)).ready()
        machine.reply = 0
        assert not await prepared(start(registry, WHEN + timedelta(seconds=1)))
        assert await prepared(start(registry, WHEN + timedelta(seconds=1)))


async def test_a_state_that_cannot_be_saved_costs_time_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(faults=Faults(snapshot_error=SnapshotError("no room")))
    async with machine.registry(tmp_path) as registry:
        episodes = [start(registry) for _ in range(3)]
        assert [await prepared(episode) for episode in episodes] == [False] * 3
        assert (await episodes[0].evaluate()).reward == 1.0
        assert saved(tmp_path) == []
        # Nor do the next ones wait for each other.
        begun, machine.release = machine.preprocessed, anyio.Event()
        for _ in range(3):
            start(registry)
        await machine.has_begun(begun + 3)
        machine.release.set()
    assert "could not be saved" in caplog.text


async def test_kept_workspaces_can_be_graded_again(tmp_path: Path) -> None:
    machine = Machine()
    async with machine.registry(tmp_path, keep="workspace") as registry:
        episodes = [start(registry), start(registry)]
        for episode in episodes:
            await episode.ready()
            await episode.claim_done(None)
            await episode.evaluate()
        kept = [
            sorted(path.name for path in (tmp_path / "state/episodes" / episode.id).iterdir())
            for episode in episodes
        ]
        assert kept[0] == kept[1]
        assert {"sealed.json", "sealed.tar.gz"} <= {*kept[1]}


async def test_states_give_way_to_newer_ones(tmp_path: Path) -> None:
    machine = Machine()
    machine.provider.saved_bytes = 1 << 20
    async with machine.registry(tmp_path, snapshot_mib=2) as registry:
        for second in (0, 1, 0, 2):
            await start(registry, WHEN + timedelta(seconds=second)).ready()
        # The second one was not used for the longest time.
        assert len(saved(tmp_path, "snapshots/0.json")) == 2
        assert len(saved(tmp_path, "snapshots/sealed.tar")) == 2
        assert await prepared(start(registry))
        assert await prepared(start(registry, WHEN + timedelta(seconds=2)))
        assert not await prepared(start(registry, WHEN + timedelta(seconds=1)))
