"""Episodes of a dead server, continued by a registry over a fake provider."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import anyio.from_thread
import pytest
from decathlon_sandbox import wire
from pydantic import TypeAdapter

from decathlon_mcp.app import create_registry
from decathlon_mcp.archives.reading import Kind, Member
from decathlon_mcp.archives.writing import archive_chunks, save
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.driver import link as link_module
from decathlon_mcp.driver.client import connect
from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.driver.stream import ReconnectPolicy
from decathlon_mcp.episodes import recovery as recovery_module
from decathlon_mcp.episodes import registry as registry_module
from decathlon_mcp.episodes.call import Waiter, call_digest
from decathlon_mcp.episodes.calls import EpisodeCalls
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.grading import WORKSPACE_FILE
from decathlon_mcp.episodes.recovery import Recovery
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.sandbox_factory import agent_sandbox
from decathlon_mcp.episodes.specification import Instant, Principal
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import (
    DecathlonError,
    EpisodeEndedError,
    ProviderUnavailableError,
    SandboxLostError,
)
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.plugins.metrics import metrics_of
from decathlon_mcp.sandboxes.base import SandboxSpec, check_swept
from decathlon_mcp.settings import read_settings
from decathlon_mcp.storage.kept_files import KeptFiles
from decathlon_mcp.storage.lock import Server, create_state_folder, instance_lock
from decathlon_mcp.storage.store import EpisodeRow, SandboxRow, Store
from decathlon_mcp.storage.trajectory import LoggedCalls, RequestKeys, Trajectory
from decathlon_mcp.types import JsonObject, public_id
from tests.driver.peer import until
from tests.episodes.environment import TOOLS, ended, exits_with, make_call, sandbox_factory
from tests.fakes.driver import FakeCall, Handler
from tests.fakes.provider import FakeMachine, FakeProvider, FakeSandbox

pytestmark = pytest.mark.anyio

HANDLE, AGENT_ID = "a" * 48, "b" * 48
PLAYER = Principal()


@asynccontextmanager
async def recovered(
    tmp_path: Path,
    phase: Phase,
    progress: JsonObject,
    *,
    task: str = "find-answer",
    suite: str | None = None,
    verdict: JsonObject | None = None,
    agent: SandboxRow | None = None,
    machine: FakeMachine | None = None,
    ends_with_response: bool = False,
    tools: Mapping[str, Mapping[str, Handler]] = TOOLS,
    write: Callable[[Trajectory], object] = lambda trajectory: None,
    damage: Callable[[Path], object] = lambda trajectory: None,
) -> AsyncGenerator[EpisodeRegistry]:
    """A registry that has taken over one episode, which a dead server left like this.

    `suite`: the name of another one than the probe suite's. `agent`: the row of the agent's sandbox, which is
    on `machine`. `write`: writes its trajectory, which is then damaged by `damage`.
    """
    state = tmp_path / "state"
    settings = read_settings({"state": state})
    create_state_folder(state)
    provider = FakeProvider(tools=tools, run=exits_with(0), machine=machine)
    factory = replace(sandbox_factory(tmp_path, provider), reconnect=ReconnectPolicy(60, 2))
    limits = create_registry(Catalogue([]), {}, settings, tmp_path).options.limits
    with Store.open(state, "dead") as store:
        store.insert_episode(
            EpisodeRow(
                id=HANDLE,
                agent_id=AGENT_ID,
                server="dead",
                suite=suite or factory.suite.name,
                task=task,
                phase=Phase.QUEUED,
                started_at=1.0,
                spec={
                    "owner": asdict(PLAYER),
                    "launch_time": "2026-01-01T00:00:00+00:00",
                    "policy": "visible",
                    "limits": asdict(limits),
                    "ends_with_response": ends_with_response,
                },
                progress={},
            )
        )
        offered = {"servers": {"probe": [{"name": "echo"}]}, "local": {}}
        store.update_episode(HANDLE, phase=phase, progress=progress, tools=offered)
        if agent is not None:
            store.save(agent)
    trajectory = Trajectory(state / "episodes" / HANDLE).create()
    files = KeptFiles(trajectory.folder)
    files.reserve_verdict()
    if verdict is not None:
        files.write_verdict(verdict)
    write(trajectory)
    trajectory.close()
    damage(trajectory.file)
    (state / "servers").mkdir(exist_ok=True)
    (state / "servers" / "dead").write_text('{"survives": true}')
    scratch = state / "scratch" / "own"
    scratch.mkdir()
    factories = {factory.suite.name: factory}
    with (
        instance_lock(state, Server(serves=True, survives=True)) as lock,
        Store.open(state, lock.name) as store,
    ):
        assert lock.dead == ["dead"]
        registry = create_registry(Catalogue([factory.suite]), factories, settings, scratch, store)
        recovery = Recovery(registry, lock, [provider], scratch)
        async with provider, registry.running():
            await recovery.run()
            yield registry
        await recovery.finish()
        assert store.unfinished_episodes() == []
        assert lock.dead == []
    assert provider.machine.sandboxes == {}


def only(registry: EpisodeRegistry) -> Episode:
    return registry.find(HANDLE, PLAYER)


async def test_an_episode_that_ended_under_a_server_before_has_its_calls(tmp_path: Path) -> None:
    async with recovered(tmp_path, Phase.QUEUED, {}) as registry:
        store = registry.store
        assert store is not None
        row = store.find_one(EpisodeRow, id=HANDLE)
        assert row is not None
        store.insert_episode(replace(row, id="ended", agent_id="ended"))
        store.end_episode("ended", Ending.CLOSED, calls=3)
        assert registry.find("ended", PLAYER).calls.sent == 3


async def test_episode_that_was_queued_is_set_up(tmp_path: Path) -> None:
    async with recovered(tmp_path, Phase.QUEUED, {}) as registry:
        assert not registry.recovering, "its state would never be ready"
        with anyio.fail_after(10):
            await only(registry).state.reach(Phase.READY)
        assert await only(registry).claim_done(None)
        assert (await only(registry).evaluate()).reward == 1.0


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(trajectory: Path) -> None:
        trajectory.rename(trajectory.with_name("moved"))
        make(trajectory)

    return damage


NOT_A_TRAJECTORY: dict[str, tuple[Phase, Callable[[Path], object]]] = {
    "FIFO": (Phase.READY, replace_by(os.mkfifo)),
    "link": (Phase.READY, replace_by(lambda file: file.symlink_to("moved"))),
    "missing": (Phase.CLAIMED, Path.unlink),
    "missing folder": (Phase.READY, lambda file: shutil.rmtree(file.parent)),
    "missing, opening": (Phase.OPENING, Path.unlink),
}


@pytest.mark.parametrize(("phase", "damage"), NOT_A_TRAJECTORY.values(), ids=NOT_A_TRAJECTORY)
async def test_episode_without_a_usable_trajectory_is_lost_and_has_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase, damage: Callable[[Path], object]
) -> None:
    async with recovered(tmp_path, phase, progress_in(phase), damage=damage) as registry:
        await assert_lost(registry, monkeypatch, "trajectory cannot be continued")


def progress_in(phase: Phase) -> JsonObject:
    if phase in (Phase.QUEUED, Phase.OPENING):
        return {}
    ready: JsonObject = {"ready_at": "2026-01-01T00:00:00+00:00", "opened_at": 1e12, "agent": "gone-agent"}
    return {**ready, "claim": {"by_agent": True}} if phase is Phase.CLAIMED else ready


async def assert_lost(registry: EpisodeRegistry, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """The episode is `sandbox_lost` for its clients, also when the registry has it from the store alone."""
    episode = registry.access(HANDLE, PLAYER).episode
    with anyio.fail_after(10):
        await ended(episode)
    assert registry.live == []
    assert (registry.admission.active, registry.admission.queued) == (0, 0)
    assert recoveries(registry) == {"ended": 1}
    monkeypatch.setattr(registry_module, "MAX_ENDED_IN_MEMORY", 0)
    for access in (registry.access(HANDLE, PLAYER), registry.access(AGENT_ID, PLAYER)):
        assert access.episode.state.ending is Ending.SANDBOX_LOST
    registry.index._episodes.clear()  # pyright: ignore[reportPrivateUsage]
    again = registry.access(HANDLE, PLAYER).episode
    assert again is not episode
    for each in (episode, again):
        verdict = await each.evaluate()
        assert (verdict.status, verdict.reward) == ("sandbox_lost", None)
        assert why in verdict.detail
        assert each.prompt.instructions
        with pytest.raises(SandboxLostError if each is episode else EpisodeEndedError):
            await make_call(each, "probe__echo", CallParams.of({}))


@pytest.mark.parametrize(
    ("phase", "gone", "why"),
    [
        (Phase.QUEUED, {"task": "no-such-task"}, "there is no task 'no-such-task'"),
        (Phase.CLAIMED, {"task": "no-such-task", "suite": "no-such-suite"}, "there is no task"),
    ],
    ids=["task", "suite"],
)
async def test_episode_whose_task_is_not_served_any_more_is_lost_and_has_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase, gone: dict[str, Any], why: str
) -> None:
    async with recovered(tmp_path, phase, progress_in(phase), **gone) as registry:
        await assert_lost(registry, monkeypatch, why)
        verdict = registry.access(HANDLE, PLAYER).episode.verdict
        assert verdict is not None
        assert verdict.task == "no-such-task"
        assert verdict.suite == gone.get("suite", registry.catalogue.suites[0].name)


@pytest.mark.parametrize("phase", [Phase.OPENING, Phase.CLAIMED])
async def test_verdict_that_only_the_folder_has_is_not_made_again(tmp_path: Path, phase: Phase) -> None:
    """The dead server could not write its store any more, for example on a full disk."""
    (tmp_path / "first").mkdir()
    async with recovered(tmp_path / "first", Phase.QUEUED, {}) as registry:
        with anyio.fail_after(10):
            verdict = await only(registry).evaluate()
    progress: JsonObject = {"opened_at": 1e12, "agent": "gone-agent"}
    if phase is not Phase.OPENING:
        progress["ready_at"] = "2026-01-01T00:00:00+00:00"
    if phase is Phase.CLAIMED:
        progress["claim"] = {"by_agent": True, "at": "2026-01-01T00:00:00+00:00"}
    (tmp_path / "second").mkdir()
    async with recovered(tmp_path / "second", phase, progress, verdict=verdict.to_json()) as registry:
        with anyio.fail_after(10):
            assert await only(registry).evaluate() == verdict
        only(registry).close()
        with anyio.fail_after(10):
            await ended(only(registry))
    written = (registry.folder(HANDLE) / "verdict.json").read_text()
    assert Verdict.model_validate_json(written) == verdict


@asynccontextmanager
async def sandbox_of_the_dead_server(
    tmp_path: Path, tools: Mapping[str, Mapping[str, Handler]] = TOOLS, **row: Any
) -> AsyncGenerator[tuple[SandboxRow, FakeMachine]]:
    """The agent's sandbox on a machine whose server was killed. `row`: what its row has instead."""
    async with FakeMachine() as machine:
        opened = anyio.Event()
        provider = FakeProvider("dead", tools=tools, machine=machine)
        spec = replace(sandbox_factory(tmp_path, provider).spec("agent", "none"), survives=True)
        async with anyio.create_task_group() as tasks:

            async def serve() -> None:
                async with (
                    provider,
                    provider.open(spec) as sandbox,
                    connect(sandbox, reconnect=ReconnectPolicy(300, 1)) as driver,
                ):
                    await driver.define([{"name": "probe"}])
                    await driver.start(["probe"], deadline_seconds=10)
                    opened.set()
                    await anyio.sleep_forever()

            tasks.start_soon(serve)
            await opened.wait()
            provider.die()
            tasks.cancel_scope.cancel()
        values: dict[str, Any] = {
            "provider": provider.name,
            "isolation": provider.isolation,
            "wire_version": wire.VERSION,
            "spec": TypeAdapter(SandboxSpec).dump_python(spec, mode="json"),
        }
        yield (
            SandboxRow(name="agent", owner="dead", episode=HANDLE, role="agent", **{**values, **row}),
            machine,
        )


READY: JsonObject = {"ready_at": "2026-01-01T00:00:00+00:00", "opened_at": 1e12, "agent": "agent"}
CLAIMED: JsonObject = {**READY, "claim": {"by_agent": True, "at": "2026-01-01T00:00:00+00:00"}}


def recoveries(registry: EpisodeRegistry) -> dict[str, float]:
    """How many episodes of dead servers were counted, by what became of them."""
    samples = [sample for metric in metrics_of(registry).registry.collect() for sample in metric.samples]
    found = {
        sample.labels["result"]: sample.value
        for sample in samples
        if sample.name == "decathlon_episodes_recovered_total"
    }
    return {result: value for result, value in found.items() if value}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"wire_version": 99}, f"wire version 99, and this server has {wire.VERSION}"),
        ({"provider": "podman"}, "provider podman and isolation container, and this server has"),
    ],
)
async def test_episode_whose_sandbox_cannot_be_taken_back_is_lost_and_says_why(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    async with (
        sandbox_of_the_dead_server(tmp_path, **row) as (agent, machine),
        recovered(tmp_path, Phase.READY, READY, agent=agent, machine=machine) as registry,
    ):
        assert machine.sandboxes == {}, "its sandbox is removed before the server listens"
        with anyio.fail_after(10):
            await ended(only(registry))
        assert only(registry).state.ending is Ending.SANDBOX_LOST
        verdict = await only(registry).evaluate()
        assert (verdict.status, verdict.reward) == ("sandbox_lost", None)
        assert reason in verdict.detail
        assert recoveries(registry) == {"ended": 1}


@pytest.mark.parametrize("ends_with_response", [False, True])
async def test_episode_that_ends_with_its_clients_response_waits_for_the_client_alone(
    tmp_path: Path, *, ends_with_response: bool
) -> None:
    async with (
        sandbox_of_the_dead_server(tmp_path) as (agent, machine),
        recovered(
            tmp_path, Phase.READY, READY, agent=agent, machine=machine, ends_with_response=ends_with_response
        ) as registry,
    ):
        episode = only(registry)
        grace_ends_at = time.monotonic() + episode.spec.limits.grace_seconds
        assert (episode.lease.deadline <= grace_ends_at) is ends_with_response


async def test_time_of_an_episode_does_not_pass_because_the_clock_was_set(tmp_path: Path) -> None:
    """An attempt whose time is over is forfeited."""
    progress = {**READY, "opened_at": 1.0, "opened": asdict(Instant.now())}
    async with (
        sandbox_of_the_dead_server(tmp_path) as (agent, machine),
        recovered(tmp_path, Phase.READY, progress, agent=agent, machine=machine) as registry,
    ):
        with anyio.fail_after(10):
            assert (await only(registry).evaluate()).reward == 1.0


async def test_closed_attempt_is_graded_although_its_driver_has_another_wire_version(tmp_path: Path) -> None:
    async with (
        sandbox_of_the_dead_server(tmp_path, wire_version=99) as (agent, machine),
        recovered(tmp_path, Phase.CLAIMED, CLAIMED, agent=agent, machine=machine) as registry,
    ):
        with anyio.fail_after(10):
            assert (await only(registry).evaluate()).reward == 1.0
        assert recoveries(registry) == {"graded": 1}


async def test_link_by_an_absolute_path_is_graded_after_the_server_of_the_capture_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each sandbox has a root of its own, as without isolation."""

    def own_root(provider: FakeProvider, spec: SandboxSpec) -> PurePosixPath:
        return PurePosixPath("/own", spec.name)

    monkeypatch.setattr(FakeProvider, "root", own_root)
    target = f"/own/{agent_sandbox(public_id(HANDLE))}/workspace/file"

    def leave_the_capture(trajectory: Trajectory) -> None:
        folder = tmp_path / "state" / "scratch" / "dead-1" / public_id(HANDLE)
        folder.mkdir(parents=True)
        members = [
            Member(name="file", kind=Kind.FILE),
            Member(name="link", kind=Kind.SYMLINK, link=target),
            Member(name="other", kind=Kind.SYMLINK, link="/own/other/workspace/file"),
        ]
        save(archive_chunks((member, ()) for member in members), folder / WORKSPACE_FILE)

    progress = {**CLAIMED, "captured": True}
    async with recovered(tmp_path, Phase.CLAIMED, progress, write=leave_the_capture) as registry:
        with anyio.fail_after(10):
            verdict = await only(registry).evaluate()
    assert (verdict.reward, len(verdict.refused)) == (1.0, 1)
    assert verdict.refused[0].startswith("other: a link that leads out")


async def test_claimed_attempt_whose_trajectory_lacks_calls_is_lost_and_not_graded(tmp_path: Path) -> None:
    claim = {**CLAIMED["claim"], "calls": 2}
    async with (
        sandbox_of_the_dead_server(tmp_path, wire_version=99) as (agent, machine),
        recovered(
            tmp_path, Phase.CLAIMED, {**CLAIMED, "claim": claim}, agent=agent, machine=machine
        ) as registry,
    ):
        with anyio.fail_after(10):
            verdict = await only(registry).evaluate()
        assert (verdict.status, verdict.reward) == ("sandbox_lost", None)
        assert "its trajectory, is damaged: 2 of 2 calls are missing" in verdict.detail


def write_calls(trajectory: Trajectory) -> None:
    """Two calls that were answered, `one` and `two`."""
    for seq, operation in enumerate(("one", "two"), 1):
        trajectory.add(
            "call",
            seq=seq,
            name="probe__echo",
            server="probe",
            tool="echo",
            request=seq,
            started_at=1.0,
            digest=call_digest("probe__echo", None),
            operation=operation,
        )
        result = {"content": [{"type": "text", "text": f"ran as {operation}"}]}
        trajectory.add("reply", seq=seq, failed=False, seconds=1.0, result=result)


async def call_again(episode: Episode, operation: str, outcomes: list[str]) -> None:
    """Send a call again, as a client does that lost its server."""
    try:
        reply = await make_call(episode, "probe__echo", CallParams(), waiter=Waiter(RequestKeys(operation)))
        outcomes.append(reply.decoded()["result"]["content"][0]["text"])
    except DecathlonError as error:
        outcomes.append(error.message)


async def test_call_that_comes_before_the_trajectory_was_read_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, resume, read_calls = anyio.Event(), threading.Event(), Trajectory.read_calls

    def read_slowly(trajectory: Trajectory) -> LoggedCalls:
        anyio.from_thread.run_sync(reading.set)
        resume.wait(10)
        return read_calls(trajectory)

    monkeypatch.setattr(Trajectory, "read_calls", read_slowly)
    outcomes = list[str]()
    async with (
        sandbox_of_the_dead_server(tmp_path) as (agent, machine),
        recovered(tmp_path, Phase.READY, READY, agent=agent, machine=machine, write=write_calls) as registry,
    ):
        with anyio.fail_after(10):
            await reading.wait()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call_again, only(registry), "two", outcomes)
                await anyio.wait_all_tasks_blocked()
                resume.set()
        assert outcomes == ["ran as two"]


async def test_a_server_whose_sandbox_cannot_be_removed_is_not_forgotten_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery_module, "ENGINE_SECONDS", 0)
    swept = list[str]()

    async def refuse(_: FakeProvider, owner: str, *, keep: Collection[str] = ()) -> int:
        swept.append(owner)
        check_swept(["agent"] if owner in ("first", "second") else [])
        return 0

    monkeypatch.setattr(FakeProvider, "sweep", refuse)
    state = tmp_path / "state"
    (state / "servers").mkdir(parents=True)
    for name in ("first", "second"):
        (state / "servers" / name).write_text('{"survives": true}')
    (scratch := state / "scratch" / "own").mkdir(parents=True)
    settings, provider = read_settings({"state": state}), FakeProvider()
    with (
        instance_lock(state, Server(serves=True, survives=True)) as lock,
        Store.open(state, lock.name) as store,
    ):
        registry = create_registry(Catalogue([]), {}, settings, scratch, store)
        async with provider, registry.running():
            await Recovery(registry, lock, [provider], scratch).run()
        assert set(swept) == {lock.name, "first", "second"}
    assert {"first", "second"} <= {file.name for file in (state / "servers").iterdir()}


async def test_call_whose_sandbox_cannot_be_reached_fails_in_time_and_its_reply_can_be_had_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "ABSENT_SECONDS", 0.3)
    runs, running, go_on = list[str](), anyio.Event(), anyio.Event()

    async def count(call: FakeCall) -> str:
        runs.append("run")
        running.set()
        await go_on.wait()
        return f"run {len(runs)}"

    async def no_engine(sandbox: object) -> None:
        raise ProviderUnavailableError("no engine answers")

    tools = {"probe": {"echo": count}}
    async with (
        sandbox_of_the_dead_server(tmp_path, tools) as (agent, machine),
        recovered(tmp_path, Phase.READY, READY, agent=agent, machine=machine, tools=tools) as registry,
    ):
        calls, outcomes = only(registry).calls, list[str]()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for operation in ("one", "two"):
                    tasks.start_soon(call_again, only(registry), operation, outcomes)
                    await running.wait()
                with monkeypatch.context() as patch:
                    sandbox = registry_sandbox(calls)
                    patch.setattr(sandbox, "reopen", partial(no_engine, sandbox))
                    await sandbox.stream.aclose()
                    await until(lambda: len(outcomes) == 2)
                    # Those that come while it is away are told as well.
                    await call_again(only(registry), "one", outcomes)
                assert all("has not reached the sandbox for" in outcome for outcome in outcomes)
                assert len(outcomes) == 3
                go_on.set()
                # On a busy machine the new stream may come after another report of its absence.
                while outcomes[-1] != "run 2":
                    await call_again(only(registry), "two", outcomes)
        assert len(runs) == 2


def registry_sandbox(calls: EpisodeCalls) -> FakeSandbox:
    """The sandbox to which calls are sent."""
    session = calls._session  # pyright: ignore[reportPrivateUsage]
    assert session is not None
    source = session.driver._sandbox  # pyright: ignore[reportPrivateUsage]
    assert isinstance(source, FakeSandbox)
    return source


def write_unanswered_call(trajectory: Trajectory, name: str = "probe__echo") -> None:
    """A call `one` that was sent, and whose reply never came."""
    trajectory.add(
        "call",
        seq=1,
        name=name,
        server="probe",
        tool="echo",
        request=1,
        started_at=1.0,
        digest=call_digest(name, None),
        operation="one",
    )


async def test_call_without_a_reply_ends_as_soon_as_its_claimed_attempt_is_recovered(tmp_path: Path) -> None:
    outcomes = list[str]()
    async with (
        sandbox_of_the_dead_server(tmp_path, wire_version=99) as (agent, machine),
        recovered(
            tmp_path, Phase.CLAIMED, CLAIMED, agent=agent, machine=machine, write=write_unanswered_call
        ) as registry,
    ):
        with anyio.fail_after(10):
            assert (await only(registry).evaluate()).reward == 1.0
            # The episode is still open for requests: nothing else would answer this one.
            await call_again(only(registry), "one", outcomes)
        assert only(registry).state.phase is Phase.SCORED
    assert outcomes == ["this attempt was closed while the call ran"]


async def test_ready_episode_without_a_sandbox_is_lost(tmp_path: Path) -> None:
    progress: JsonObject = {"ready_at": "2026-01-01T00:00:00+00:00", "opened_at": 1e12, "agent": "gone-agent"}
    async with recovered(tmp_path, Phase.READY, progress) as registry:
        with anyio.fail_after(10):
            await ended(only(registry))
        assert only(registry).state.ending is Ending.SANDBOX_LOST
        assert recoveries(registry) == {"ended": 1}
