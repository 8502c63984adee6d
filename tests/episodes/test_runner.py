"""The life of an episode over fake sandboxes: success, every kind of failure, expiry and cancellation."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.app import create_registry
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.driver import client as driver_module
from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.episode import Episode, EpisodeSpec
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.runner import EpisodeRunner
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import (
    EpisodeClaimedError,
    EpisodeEndedError,
    SandboxLostError,
)
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.settings import read_settings
from decathlon_mcp.storage.kept_tools import KeptTools
from tests.episodes.environment import (
    TOOLS,
    ended,
    exits_with,
    make_call,
    running_registry,
    sandbox_factory,
    suite_with,
)
from tests.fakes.driver import FakeCall, Faults, ProcessExit
from tests.fakes.provider import FakeProvider
from tests.storage.trajectories import events

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PLAYER = Principal()


def trajectory(folder: Path, episode: Episode) -> list[dict[str, Any]]:
    """What was done: the lines, without calls that wait and without the two first ones."""
    lines = events(folder / "state" / "episodes" / episode.id)
    return [line for line in lines if line["event"] not in ("start", "ready", "accepted")]


async def test_an_attempt_that_exhausts_its_memory_in_a_call_is_forfeited(tmp_path: Path) -> None:
    async with running_registry(tmp_path, FakeProvider(tools=TOOLS)) as registry:
        episode = registry.start("find-answer", PLAYER)
        with pytest.raises(EpisodeClaimedError, match=r"closed while the call ran: .*out of memory"):
            await make_call(episode, "probe__die", CallParams.of({}))
        verdict = await episode.evaluate()
        assert (verdict.status, verdict.reward, verdict.claimed) == ("forfeited", 0.0, False)
        assert "out of memory" in verdict.detail
        assert episode.state.phase is Phase.SCORED
        assert await episode.claim_done(None) is False
    assert [event["event"] for event in trajectory(tmp_path, episode)] == ["call", "reply", "claim", "end"]


async def test_a_sandbox_killed_from_outside_in_a_call_gives_no_reward(tmp_path: Path) -> None:
    async def die(call: FakeCall) -> str:
        raise ProcessExit(137)

    async with running_registry(tmp_path, FakeProvider(tools={"probe": {"die": die}})) as registry:
        episode = registry.start("find-answer", PLAYER)
        with pytest.raises(SandboxLostError, match="exit code 137"):
            await make_call(episode, "probe__die", CallParams.of({}))
        await ended(episode)
        verdict = await episode.evaluate()
        assert (verdict.status, verdict.reward) == ("sandbox_lost", None)
    assert [event["event"] for event in trajectory(tmp_path, episode)] == ["call", "reply", "end"]


async def test_an_attempt_whose_driver_does_not_freeze_is_forfeited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "FREEZE_SECONDS", 0.1)

    def faults(spec: SandboxSpec) -> Faults:
        return Faults(silent_on="freeze") if spec.name.endswith("-agent") else Faults()

    async with running_registry(tmp_path, FakeProvider(tools=TOOLS, faults=faults)) as registry:
        verdict = await registry.start("find-answer", PLAYER).evaluate()
        assert (verdict.status, verdict.reward) == ("forfeited", 0.0)
        assert "(a control sandbox worked)" in verdict.detail


async def test_an_episode_that_raises_ends_alone(tmp_path: Path) -> None:
    explosions = [False, False, True]

    def explode(spec: SandboxSpec) -> Faults:
        if explosions.pop():
            raise RuntimeError("a fault of the provider")
        return Faults()

    provider = FakeProvider(tools=TOOLS, faults=explode, run=exits_with(0))
    async with running_registry(tmp_path, provider) as registry:
        broken = registry.start("find-answer", PLAYER)
        await ended(broken)
        assert broken.state.ending is Ending.FAULT
        with pytest.raises(EpisodeEndedError, match="a fault of the server"):
            await make_call(broken, "probe__echo", CallParams.of({}))
        assert (await registry.start("find-answer", PLAYER).evaluate()).reward == 1.0


async def test_the_idle_lease_ends_an_episode_that_is_being_set_up(tmp_path: Path) -> None:
    provider = FakeProvider(faults=Faults(silent_on="start"))
    async with running_registry(tmp_path, provider, idle_seconds=0.1) as registry:
        episode = registry.start("find-answer", PLAYER)
        await ended(episode)
        assert episode.state.ending is Ending.LEASE_EXPIRED


async def test_the_idle_lease_ends_a_ready_episode(tmp_path: Path) -> None:
    async with running_registry(tmp_path, FakeProvider(tools=TOOLS), idle_seconds=0.3) as registry:
        episode = registry.start("find-answer", PLAYER)
        with episode.lease.hold():
            await episode.ready()
        await ended(episode)
        assert episode.state.ending is Ending.LEASE_EXPIRED
        assert (await episode.evaluate()).status == "not_evaluated"


async def test_the_absolute_limit_ends_an_episode_that_is_in_use(tmp_path: Path) -> None:
    async with running_registry(tmp_path, FakeProvider(tools=TOOLS), episode_seconds=60) as registry:
        episode = registry.start("find-answer", PLAYER)
        await episode.ready()
        with episode.lease.hold():
            # A set-up on a busy machine would take more than a limit that a test can wait for.
            episode.lease.start(elapsed_seconds=59.8)
            await ended(episode)
        assert episode.state.ending is Ending.TIME_OVER
        assert episode.verdict is not None
        assert (episode.verdict.status, episode.verdict.reward) == ("forfeited", 0.0)
        assert episode.verdict.truncated


def turns_before(step: int) -> int:
    """Turns of the event loop before an interruption: some more in each round, and many more in late ones."""
    # Worker threads take part in a grading. On a busy machine the loop turns more often while it waits.
    return step * 7 + max(0, step - 250) ** 2 * 3


@pytest.mark.parametrize("task", ["find-answer", pytest.param("made-answer", marks=pytest.mark.long)])
async def test_an_episode_closed_at_any_moment_leaves_nothing(tmp_path: Path, task: str) -> None:
    """Each round closes the episode a few steps later, until one is closed only after it was scored."""
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(tmp_path, provider) as registry:
        for step in range(400):
            episode = registry.start(task, PLAYER)
            scored = False
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(episode.evaluate)
                for _ in range(turns_before(step)):
                    await anyio.lowlevel.checkpoint()
                scored = episode.state.phase is Phase.SCORED
                episode.close()
                await ended(episode)
            assert provider.machine.sandboxes == {}
            assert registry.admission.active == 0
            assert list((tmp_path / "scratch").iterdir()) == []
            if scored:
                return
    pytest.fail("no episode was ever scored")


def new_episode(
    registry: EpisodeRegistry, factory: SandboxFactory, folder: Path, number: int, task_name: str
) -> Episode:
    """An episode that no runner owns yet."""
    task = factory.suite.tasks[task_name]
    spec = EpisodeSpec(
        id=f"{number:048x}"[::-1],
        agent_id=f"{number:048x}",
        task=task,
        task_name=task_name,
        owner=PLAYER,
        launch_time=datetime.now().astimezone(),
        policy="visible",
        limits=registry.options.limits.for_task(task),
    )
    episode = Episode(
        spec,
        sandbox_factory=factory,
        ticket=registry.admission.reserve(task_name),
        folder=folder / spec.id,
        disk=None,
        emit=registry.events.emit,
    )
    episode.trajectory.create()
    return episode


@pytest.mark.parametrize("task", ["made-answer", pytest.param("find-answer", marks=pytest.mark.long)])
async def test_a_runner_cancelled_at_any_moment_leaves_nothing(tmp_path: Path, task: str) -> None:
    """Each round cancels the runner some steps later, until one is cancelled only after the score."""
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    factory = sandbox_factory(tmp_path, provider)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    settings = read_settings({"state": tmp_path / "state"})
    registry = create_registry(Catalogue([factory.suite]), {factory.suite.name: factory}, settings, scratch)
    kept_tools = KeptTools(tmp_path / "tools")
    async with provider:
        for step in range(400):
            episode = new_episode(registry, factory, tmp_path / "journals", step, task)
            runner = EpisodeRunner(
                episode,
                admission=registry.admission,
                signer=registry.signer,
                scratch=scratch,
                kept_tools=kept_tools,
            )
            scored = False
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(runner.run)
                tasks.start_soon(episode.evaluate)
                for _ in range(turns_before(step)):
                    await anyio.lowlevel.checkpoint()
                scored = episode.state.phase is Phase.SCORED
                tasks.cancel_scope.cancel()
            assert episode.state.ending is Ending.SERVER_STOPPED
            assert provider.machine.sandboxes == {}
            assert (registry.admission.active, registry.admission.queued) == (0, 0)
            assert list(scratch.iterdir()) == []
            if scored:
                return
    pytest.fail("no episode was ever scored")


async def test_the_revision_in_a_verdict_is_that_of_the_set_up(tmp_path: Path) -> None:
    suite = suite_with(tmp_path)
    task = suite / "tasks" / "probe" / "find-answer"
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(tmp_path, provider, suite=suite) as registry:
        verdicts: list[Verdict] = []
        for changes_later in (False, True, False):
            episode = registry.start("find-answer", PLAYER)
            await episode.ready()
            if changes_later:
                (task / "evaluation" / "main.py").write_text("raise SystemExit(0)")
            verdicts.append(await episode.evaluate())
    first, during, after = verdicts
    assert first.suite_revision == during.suite_revision != after.suite_revision
    assert [verdict.to_json().get("suite_changed") for verdict in verdicts] == [None, True, None]
    assert first.evaluator_digest != during.evaluator_digest == after.evaluator_digest


async def test_a_verdict_says_that_common_files_changed_since_the_server_read_them(tmp_path: Path) -> None:
    suite = suite_with(tmp_path)
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(tmp_path, provider, suite=suite) as registry:
        (suite / "suite.yaml").write_text((suite / "suite.yaml").read_text() + "\n")
        verdict = await registry.start("find-answer", PLAYER).evaluate()
    assert verdict.suite_changed
