"""An episode's life over sandboxes in this process: what goes well, and a zoo of what does not."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.episodes.access import Principal
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry, running
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import (
    DecathlonError,
    EpisodeClaimedError,
    ImageError,
    SandboxLostError,
    SetUpError,
    UnknownEpisodeError,
)
from decathlon_mcp.sandboxes.base import Limits
from decathlon_mcp.settings import Settings
from decathlon_mcp.suites.loading import load_suite
from tests.fakes.driver import Died, FakeCall, FakeRun, Faults
from tests.fakes.provider import FakeProvider
from tests.probe.serving import SUITE

pytestmark = pytest.mark.anyio


async def echo(call: FakeCall) -> str:
    return str(call.arguments.get("text", ""))


async def hang(call: FakeCall) -> str:
    await anyio.sleep_forever()
    return ""


async def die(call: FakeCall) -> str:
    raise Died(out_of_memory=True)


TOOLS = {"probe": {"echo": echo, "hang": hang, "die": die}}


def grading(exit_code: int) -> Any:
    """A `run` that ends every evaluator with that code."""

    def run(asked: FakeRun) -> int:
        return exit_code

    return run


@asynccontextmanager
async def house(tmp_path: Path, provider: FakeProvider, **settings: Any) -> AsyncGenerator[EpisodeRegistry]:
    suite = load_suite(SUITE)
    common = tmp_path / "common.tar"
    suite.common_archive(common)
    sandbox_factory = SandboxFactory(
        suite=suite,
        provider=provider,
        image="fake",
        names="decathlon",
        network="auto",
        limits=Limits(),
        common=common,
    )
    chosen = Settings.model_validate({"state": tmp_path / "state", "drain_seconds": 5, **settings})
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    async with (
        provider,
        running(Catalogue([suite]), {suite.name: sandbox_factory}, chosen, scratch) as episodes,
    ):
        yield episodes
    assert provider.machine.sandboxes == {}, "a sandbox is left"


async def over(episode: Episode) -> None:
    await episode.state.reach(Phase.ENDED)


async def test_an_episode_goes_from_queued_to_scored_in_two_sandboxes(tmp_path: Path) -> None:
    provider = FakeProvider(tools=TOOLS, run=grading(0))
    async with house(tmp_path, provider) as episodes:
        episode = episodes.start("find-answer", Principal())
        assert episode.state.phase is Phase.QUEUED
        await episode.ready()
        assert len(provider.machine.sandboxes) == 1
        await episode.claim_done("42")
        verdict = await episode.evaluate()
        assert verdict.reward == 1.0
        assert episode.state.phase is Phase.SCORED
        assert provider.machine.sandboxes == {}
        assert [sandbox.spec.name.rpartition("-")[2] for sandbox in provider.opened] == ["agent", "grader1"]
        episode.close()
        await over(episode)
        assert episode.state.ending is Ending.CLOSED


async def test_a_sandbox_that_does_not_open_is_the_answer_to_whoever_waits(tmp_path: Path) -> None:
    provider = FakeProvider(faults=Faults(open_error=ImageError("no such image: fake", image="fake")))
    async with house(tmp_path, provider) as episodes:
        episode = episodes.start("find-answer", Principal())
        with pytest.raises(ImageError, match="no such image"):
            await episode.ready()
        with pytest.raises(ImageError):
            await episode.call("probe__echo", {})
        assert (await episode.evaluate()).status == "set_up_failed"


async def test_a_sandbox_lost_in_a_call_fails_it_and_gives_no_reward(tmp_path: Path) -> None:
    async with house(tmp_path, FakeProvider(tools=TOOLS)) as episodes:
        episode = episodes.start("find-answer", Principal())
        with pytest.raises(SandboxLostError, match="out of memory"):
            await episode.call("probe__die", {})
        await over(episode)
        verdict = await episode.evaluate()
        assert verdict.status == "sandbox_lost"
        assert verdict.reward is None
        assert "out of memory" in verdict.detail


async def test_a_grader_lost_gives_no_reward(tmp_path: Path) -> None:
    def faults(spec: Any) -> Faults:
        return Faults(dies_on="run") if "grader" in spec.name else Faults()

    async with house(tmp_path, FakeProvider(tools=TOOLS, faults=faults)) as episodes:
        episode = episodes.start("find-answer", Principal())
        verdict = await episode.evaluate()
        assert verdict.status == "sandbox_lost"
        await over(episode)
        assert episode.state.ending is Ending.NO_VERDICT


async def test_garbage_and_stubborn_removals_are_borne(tmp_path: Path) -> None:
    provider = FakeProvider(tools=TOOLS, run=grading(1), faults=Faults(garbage=True, removals_refused=2))
    async with house(tmp_path, provider) as episodes:
        episode = episodes.start("find-answer", Principal())
        reply = await episode.call("probe__echo", {"text": "through"})
        assert reply["result"]["content"][0]["text"] == "through"
        assert (await episode.evaluate()).reward == 0.0


async def test_servers_that_fail_name_themselves_and_their_last_words(tmp_path: Path) -> None:
    faults = Faults(servers_that_fail={"probe": "the licence has run out"})
    async with house(tmp_path, FakeProvider(tools=TOOLS, faults=faults)) as episodes:
        episode = episodes.start("find-answer", Principal())
        with pytest.raises(SetUpError, match="the licence has run out") as failed:
            await episode.ready()
        assert failed.value.data["server"] == "probe"


async def test_a_set_up_that_never_ends_is_ended(tmp_path: Path) -> None:
    faults = Faults(silent_on="start")
    async with house(tmp_path, FakeProvider(faults=faults), set_up_seconds=0.2) as episodes:
        episode = episodes.start("find-answer", Principal())
        with pytest.raises(SetUpError, match=r"longer than 0\.2 s"):
            await episode.ready()


async def test_a_call_in_flight_when_the_attempt_is_claimed_says_so(tmp_path: Path) -> None:
    async with house(tmp_path, FakeProvider(tools=TOOLS, run=grading(1))) as episodes:
        episode = episodes.start("find-answer", Principal())
        await episode.ready()
        failures: list[DecathlonError] = []

        async def call() -> None:
            try:
                await episode.call("probe__hang", {})
            except DecathlonError as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            while episode.calls == 0:
                await anyio.lowlevel.checkpoint()
            await episode.claim_done(None)
        assert [type(failure) for failure in failures] == [EpisodeClaimedError]


async def test_one_episode_that_raises_ends_alone(tmp_path: Path) -> None:
    def explode(spec: Any) -> Faults:
        if explosions.pop():
            raise RuntimeError("a fault of the provider")
        return Faults()

    explosions = [False, False, True]
    async with house(tmp_path, FakeProvider(tools=TOOLS, faults=explode, run=grading(0))) as episodes:
        unlucky = episodes.start("find-answer", Principal())
        await over(unlucky)
        assert unlucky.state.ending is Ending.FAULT
        lucky = episodes.start("find-answer", Principal())
        assert (await lucky.evaluate()).reward == 1.0


async def test_a_server_that_stops_leaves_no_episode_and_grades_what_was_claimed(tmp_path: Path) -> None:
    provider = FakeProvider(tools=TOOLS, run=grading(0))
    async with house(tmp_path, provider) as episodes:
        playing = episodes.start("find-answer", Principal())
        claimed = episodes.start("find-answer", Principal())
        await playing.ready()
        await claimed.claim_done(None)
    assert playing.state.ending is Ending.SERVER_STOPPED
    assert playing.verdict is not None
    assert playing.verdict.status == "not_evaluated"
    assert claimed.verdict is not None
    assert claimed.verdict.reward == 1.0


async def test_an_episode_closed_at_any_moment_leaves_nothing(tmp_path: Path) -> None:
    """Stepped through a whole life, until one is closed only after it was scored."""
    provider = FakeProvider(tools=TOOLS, run=grading(0))
    async with house(tmp_path, provider) as episodes:
        for step in range(400):
            episode = episodes.start("find-answer", Principal())
            scored = False
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(episode.evaluate)
                for _ in range(step * 3):
                    await anyio.lowlevel.checkpoint()
                scored = episode.state.phase is Phase.SCORED
                episode.close()
                await over(episode)
            assert provider.machine.sandboxes == {}
            assert episodes.admission.active == 0
            assert list((tmp_path / "scratch").iterdir()) == []
            if scored:
                return
    pytest.fail("no episode was ever scored")


async def test_whose_episode_it_is_decides_who_finds_it(tmp_path: Path) -> None:
    async with house(tmp_path, FakeProvider(tools=TOOLS)) as episodes:
        ada, bob, root = Principal(token="ada"), Principal(token="bob"), Principal(token="root", role="admin")
        episode = episodes.start("find-answer", ada)
        assert episodes.find(episode.id, ada) is episode
        assert episodes.find(episode.id, root) is episode
        with pytest.raises(UnknownEpisodeError):
            episodes.find(episode.id, bob)
        assert episodes.owned_by(bob) == []
        assert episodes.owned_by(ada) == [episode]


async def test_the_trajectory_stays_on_disk(tmp_path: Path) -> None:
    async with house(tmp_path, FakeProvider(tools=TOOLS, run=grading(0))) as episodes:
        episode = episodes.start("find-answer", Principal())
        await episode.call("probe__echo", {"text": "kept"})
        await episode.claim_done("last words")
        await episode.evaluate()
        episode.close()
        await over(episode)
    lines = (tmp_path / "state" / "episodes" / episode.id / "trajectory.jsonl").read_text().splitlines()
    assert [line.split('"')[3] for line in lines] == ["call", "claim", "end"]
    assert "kept" in lines[0]
    assert "last words" in lines[1]


async def test_an_episode_closed_before_it_began_never_opens_a_sandbox(tmp_path: Path) -> None:
    provider = FakeProvider(tools=TOOLS)
    async with house(tmp_path, provider) as episodes:
        episode = episodes.start("find-answer", Principal())
        episode.close()
        await over(episode)
        assert episode.state.ending is Ending.CLOSED
        assert provider.opened == []


async def test_a_disk_that_fails_costs_no_episode_and_no_verdict(tmp_path: Path) -> None:
    async with house(tmp_path, FakeProvider(tools=TOOLS, run=grading(0))) as episodes:
        unlucky = episodes.start("find-answer", Principal())
        other = episodes.start("find-answer", Principal())
        await unlucky.call("probe__echo", {"text": "kept in memory only"})
        with (unlucky.journal.folder / "trajectory.jsonl").open("ab") as trajectory:
            trajectory.write(b'{"event": "call", "torn')
        await unlucky.claim_done(None)
        shutil.rmtree(unlucky.journal.folder)
        unlucky.close()
        await over(unlucky)
        assert (await other.evaluate()).reward == 1.0


async def test_a_start_that_fails_gives_its_place_back(tmp_path: Path) -> None:
    async with house(tmp_path, FakeProvider(tools=TOOLS), max_sandboxes=1, max_queue=0) as episodes:
        folder = tmp_path / "state" / "episodes"
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.write_text("in the way")
        for _ in range(3):
            with pytest.raises(OSError, match="episodes"):
                episodes.start("find-answer", Principal())
        assert episodes.admission.active == 0
        folder.unlink()
        await episodes.start("find-answer", Principal()).ready()
