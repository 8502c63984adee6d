"""Episodes of a dead server, continued by a registry over a fake provider."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_sandbox import wire
from pydantic import TypeAdapter

from decathlon_mcp.app import create_registry
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.episodes import registry as registry_module
from decathlon_mcp.episodes.access import Principal
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.recovery import Recovery
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.instance import create_state_folder, instance_lock
from decathlon_mcp.storage.journal import Journal
from decathlon_mcp.storage.store import EpisodeRow, SandboxRow, Store
from decathlon_mcp.types import JsonObject
from tests.episodes.environment import TOOLS, ended, exits_with, sandbox_factory
from tests.fakes.provider import FakeMachine, FakeProvider

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
    verdict: JsonObject | None = None,
    has_file: bool = True,
    engine_is_late: bool = False,
    agent: SandboxRow | None = None,
    machine: FakeMachine | None = None,
) -> AsyncGenerator[EpisodeRegistry]:
    """A registry that has taken over one episode, which a dead server left like this.

    `has_file`: whether that server's lock file is still there. `engine_is_late`: no engine answers at the
    first start. `agent`: the row of the agent's sandbox, which is on `machine`.
    """
    state = tmp_path / "state"
    settings = Settings.model_validate({"state": state})
    create_state_folder(state)
    provider = FakeProvider(tools=TOOLS, run=exits_with(0), machine=machine)
    factory = sandbox_factory(tmp_path, provider)
    limits = create_registry(Catalogue([]), {}, settings, tmp_path).options.limits
    with Store.open(state, "dead") as store:
        store.insert_episode(
            EpisodeRow(
                id=HANDLE,
                agent_id=AGENT_ID,
                server="dead",
                suite=factory.suite.name,
                task=task,
                phase=Phase.QUEUED,
                started_at=1.0,
                spec={
                    "owner": asdict(PLAYER),
                    "launch_time": "2026-01-01T00:00:00+00:00",
                    "policy": "visible",
                    "limits": asdict(limits),
                    "keeps_workspace": False,
                    "held": False,
                },
                progress={},
            )
        )
        store.update_episode(HANDLE, phase=phase, progress=progress, tools={"servers": {}, "local": {}})
        if agent is not None:
            store.insert_sandbox(agent)
    journal = Journal(state / "episodes" / HANDLE)
    if verdict is not None:
        journal.write_verdict(verdict)
    journal.close()
    (state / "servers").mkdir(exist_ok=True)
    if has_file:
        (state / "servers" / "dead").write_text('{"survives": true}')
    scratch = state / "scratch" / "own"
    scratch.mkdir()
    factories = {factory.suite.name: factory}
    if engine_is_late:
        with instance_lock(state, survives=True) as lock, Store.open(state, lock.name) as store:
            registry = create_registry(Catalogue([factory.suite]), factories, settings, scratch, store)
            provider.unavailable = True
            async with provider, registry.running():
                with pytest.raises(ProviderUnavailableError):
                    await Recovery(registry, lock, [provider], scratch).run()
            provider.unavailable = False
    with instance_lock(state, survives=True) as lock, Store.open(state, lock.name) as store:
        assert lock.dead == (["dead"] if has_file else [])
        registry = create_registry(Catalogue([factory.suite]), factories, settings, scratch, store)
        recovery = Recovery(registry, lock, [provider], scratch)
        async with provider, registry.running():
            await recovery.run()
            yield registry
        recovery.forget_owners()
        assert store.live_episodes() == []
        assert lock.dead == []
    assert provider.machine.sandboxes == {}


def only(registry: EpisodeRegistry) -> Episode:
    return registry.find(HANDLE, PLAYER)


async def test_episode_that_was_queued_is_set_up(tmp_path: Path) -> None:
    async with recovered(tmp_path, Phase.QUEUED, {}) as registry:
        assert not registry.recovering, "its state would never be ready"
        with anyio.fail_after(10):
            await only(registry).state.reach(Phase.READY)
        assert await only(registry).claim_done(None)
        assert (await only(registry).evaluate()).reward == 1.0


async def test_episode_that_was_being_closed_ends_as_closed(tmp_path: Path) -> None:
    for number, phase in enumerate((Phase.QUEUED, Phase.OPENING, Phase.READY)):
        folder = tmp_path / str(number)
        folder.mkdir()
        progress: JsonObject = {"requested_ending": str(Ending.CLOSED)}
        async with recovered(folder, phase, progress) as registry:
            with anyio.fail_after(10):
                await ended(only(registry))
            assert only(registry).state.ending is Ending.CLOSED


async def test_ready_episode_without_a_sandbox_is_lost(tmp_path: Path) -> None:
    progress: JsonObject = {"ready_at": "2026-01-01T00:00:00+00:00", "opened_at": 1e12, "agent": "gone-agent"}
    async with recovered(tmp_path, Phase.READY, progress) as registry:
        with anyio.fail_after(10):
            await ended(only(registry))
        assert only(registry).state.ending is Ending.SANDBOX_LOST
        assert recoveries(registry) == {"ended": 1}


async def test_episode_of_a_task_that_is_not_served_any_more_ends(tmp_path: Path) -> None:
    async with recovered(tmp_path, Phase.QUEUED, {}, task="no-such-task") as registry:
        assert registry.live == []
        assert registry.store is not None
        assert [row.ending for row in registry.store.ended_episodes(5)] == [str(Ending.NOT_CONTINUED)]


async def test_ended_episode_that_is_not_in_memory_any_more_is_read_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "MAX_ENDED_IN_MEMORY", 0)
    async with recovered(tmp_path, Phase.QUEUED, {}) as registry:
        episode = only(registry)
        with anyio.fail_after(10):
            await episode.state.reach(Phase.READY)
            await episode.claim_done(None)
            verdict = await episode.evaluate()
            episode.close()
            await ended(episode)
            registry.start("find-answer", PLAYER)
        assert only(registry) is not episode
        assert await only(registry).evaluate() == verdict


@pytest.mark.parametrize("phase", [Phase.OPENING, Phase.READY, Phase.CLAIMED])
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
    assert registry.written_verdict(HANDLE) == verdict


async def test_start_without_an_engine_leaves_the_episode_to_the_next_one(tmp_path: Path) -> None:
    async with recovered(tmp_path, Phase.QUEUED, {}, engine_is_late=True) as registry:
        with anyio.fail_after(10):
            await only(registry).state.reach(Phase.READY)


async def test_episode_of_a_server_that_has_no_file_any_more_is_continued(tmp_path: Path) -> None:
    """Its start failed after it had taken the episode over, or it could not write the episode's end."""
    async with recovered(tmp_path, Phase.QUEUED, {}, has_file=False) as registry:
        with anyio.fail_after(10):
            await only(registry).state.reach(Phase.READY)


@asynccontextmanager
async def sandbox_of_the_dead_server(
    tmp_path: Path, **row: Any
) -> AsyncGenerator[tuple[SandboxRow, FakeMachine]]:
    """The agent's sandbox on a machine whose server was killed. `row`: what its row has instead."""
    async with FakeMachine() as machine:
        opened = anyio.Event()
        provider = FakeProvider("dead", tools=TOOLS, machine=machine)
        spec = replace(sandbox_factory(tmp_path, provider).spec("agent", "none"), survives=True)
        async with anyio.create_task_group() as tasks:

            async def serve() -> None:
                async with provider, provider.open(spec):
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
            "spec": TypeAdapter(SandboxSpec).dump_python(spec, mode="json", exclude={"command"}),
        }
        yield (
            SandboxRow(name="agent", owner="dead", episode=HANDLE, role="agent", **{**values, **row}),
            machine,
        )


READY: JsonObject = {"ready_at": "2026-01-01T00:00:00+00:00", "opened_at": 1e12, "agent": "agent"}
CLAIMED: JsonObject = {**READY, "claim": {"by_agent": True, "at": "2026-01-01T00:00:00+00:00"}}


def recoveries(registry: EpisodeRegistry) -> dict[str, float]:
    """How many episodes of dead servers were counted, by what became of them."""
    samples = [sample for metric in registry.metrics.registry.collect() for sample in metric.samples]
    found = {
        sample.labels["result"]: sample.value
        for sample in samples
        if sample.name == "decathlon_episodes_recovered_total"
    }
    return {result: value for result, value in found.items() if value}


class OwnersAtTheTime(logging.Handler):
    """Notes for each message about an episode that cannot be continued which server has the episode."""

    def __init__(self, state: Path) -> None:
        super().__init__()
        self._state = state
        self.owners: list[str] = []
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "an episode cannot be continued":
            self.reasons.append(str(record.__dict__["fields"]["why"]))
            with Store.open_read_only(self._state) as store:
                assert store is not None
                self.owners += [row.server for row in store.unfinished_episodes()]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"wire_version": 99}, f"wire version 99, and this server has {wire.VERSION}"),
        (
            {"isolation": "none"},
            "isolation none, and this server has provider fake and isolation container",
        ),
        ({"provider": "podman"}, "provider podman and isolation container, and this server has"),
    ],
)
async def test_episode_whose_sandbox_cannot_be_taken_back_is_named_before_anything_is_taken(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    noted = OwnersAtTheTime(tmp_path / "state")
    log = logging.getLogger("decathlon.episodes")
    log.addHandler(noted)
    try:
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
    finally:
        log.removeHandler(noted)
    assert noted.owners == ["dead"]
    assert [reason in text for text in noted.reasons] == [True]


async def test_closed_attempt_is_graded_although_its_driver_has_another_wire_version(tmp_path: Path) -> None:
    async with (
        sandbox_of_the_dead_server(tmp_path, wire_version=99) as (agent, machine),
        recovered(tmp_path, Phase.CLAIMED, CLAIMED, agent=agent, machine=machine) as registry,
    ):
        with anyio.fail_after(10):
            assert (await only(registry).evaluate()).reward == 1.0
        assert recoveries(registry) == {"graded": 1}


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
        assert "2 of 2 calls are missing in its trajectory" in verdict.detail


async def test_episode_that_is_taken_back_is_counted_as_continued(tmp_path: Path) -> None:
    async with (
        sandbox_of_the_dead_server(tmp_path) as (agent, machine),
        recovered(tmp_path, Phase.READY, READY, agent=agent, machine=machine) as registry,
    ):
        with anyio.fail_after(10):
            await only(registry).state.reach(Phase.READY)
        assert recoveries(registry) == {"continued": 1}
