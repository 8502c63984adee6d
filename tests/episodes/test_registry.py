"""The registry: starting, finding, forgetting and draining episodes."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes import registry as registry_module
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.errors import (
    EpisodeClaimedError,
    SuiteError,
    UnknownEpisodeError,
)
from tests.episodes.environment import TOOLS, ended, exits_with, make_call, running_registry, suite_with
from tests.fakes.driver import FakeRun
from tests.fakes.provider import FakeProvider

pytestmark = pytest.mark.anyio

ADA, BOB = Principal(token="ada"), Principal(token="bob")
ADMIN = Principal(token="root", role="admin")
NOBODY = Principal()


async def test_a_broken_rubric_refuses_the_start(tmp_path: Path) -> None:
    suite = suite_with(tmp_path)
    (suite / "tasks" / "probe" / "dense" / "evaluation" / "rubric.yaml").write_text("weights: 3")
    async with running_registry(tmp_path, FakeProvider(), suite=suite) as registry:
        with pytest.raises(SuiteError, match=r"rubric\.yaml"):
            registry.start("dense", ADA)


@pytest.mark.parametrize("by", ["calls", "client"])
async def test_in_a_suite_that_grades_none_a_truncated_attempt_is_not_graded_and_its_reward_is_0(
    tmp_path: Path, by: str
) -> None:
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(
        tmp_path, provider, suite=suite_with(tmp_path, grades_truncated=False)
    ) as registry:
        episode = registry.start("find-answer", ADA, max_calls=1)
        await make_call(episode, "probe__echo", CallParams.of({"text": "one"}))
        if by == "client":
            assert await episode.claim_done(None, truncated=True)
        else:
            with pytest.raises(EpisodeClaimedError, match="this attempt is closed and counts as failed"):
                await make_call(episode, "probe__echo", CallParams.of({"text": "two"}))
        verdict = await episode.evaluate()
        assert (verdict.status, verdict.reward, verdict.success) == ("forfeited", 0.0, False)
        assert (verdict.claimed, verdict.truncated) == (False, True)
        assert verdict.detail.endswith("`grades_truncated: true` in suite.yaml grades them")
        assert verdict.signature is not None
        other = registry.start("find-answer", ADA)
        await other.ready()
        await other.claim_done("done")
        assert (await other.evaluate()).reward == 1.0


async def test_only_the_owner_and_administrators_find_an_episode(tmp_path: Path) -> None:
    async with running_registry(tmp_path, FakeProvider(tools=TOOLS)) as registry:
        episode = registry.start("find-answer", ADA)
        assert registry.find(episode.id, ADA) is episode
        assert registry.find(episode.id, ADMIN) is episode
        for episode_id, principal in ((episode.id, BOB), (episode.id, NOBODY), ("0" * 48, ADA)):
            with pytest.raises(UnknownEpisodeError):
                registry.find(episode_id, principal)
        other, second = registry.start("find-answer", BOB), registry.start("find-answer", ADA)
        assert registry.owned_by(ADA) == [second, episode]
        assert registry.owned_by(ADMIN) == [second, other, episode]
        assert registry.owned_by(NOBODY) == []


async def test_a_principal_lists_its_own_episodes_newest_first(tmp_path: Path) -> None:
    async with running_registry(tmp_path, FakeProvider(tools=TOOLS)) as registry:
        first, other, second = (registry.start("find-answer", owner) for owner in (ADA, BOB, ADA))
        assert registry.owned_by(ADA) == [second, first]
        assert registry.owned_by(ADMIN) == [second, other, first]
        assert registry.owned_by(NOBODY) == []


async def test_the_oldest_ended_episodes_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "MAX_ENDED_EPISODES", 1)
    async with running_registry(tmp_path, FakeProvider(tools=TOOLS)) as registry:
        live = registry.start("find-answer", ADA)
        first, second = (registry.start("find-answer", ADA) for _ in range(2))
        for episode in (first, second):
            episode.close()
            await ended(episode)
        assert registry.find(first.id, ADA) is first
        registry.start("find-answer", ADA)
        with pytest.raises(UnknownEpisodeError, match="forgotten"):
            registry.find(first.id, ADA)
        assert registry.agent_access(first.spec.agent_id) is None
        assert registry.find(second.id, ADA) is second
        assert registry.find(live.id, ADA) is live


async def test_a_start_that_fails_gives_its_place_back(tmp_path: Path) -> None:
    async with running_registry(
        tmp_path, FakeProvider(tools=TOOLS), max_sandboxes=1, max_queue=0
    ) as registry:
        folder = tmp_path / "state" / "episodes"
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.write_text("a file where the folder belongs")
        for _ in range(3):
            with pytest.raises(OSError, match="episodes"):
                registry.start("find-answer", ADA)
        assert registry.admission.active == 0
        folder.unlink()
        await registry.start("find-answer", ADA).ready()


async def test_a_grading_that_outlasts_the_drain_is_cancelled_and_leaves_nothing(tmp_path: Path) -> None:
    async def run(request: FakeRun) -> int:
        await anyio.sleep_forever()
        return 0

    provider = FakeProvider(tools=TOOLS, run=run)
    async with running_registry(tmp_path, provider, drain_seconds=0.1) as registry:
        episode = registry.start("find-answer", ADA)
        await episode.claim_done(None)
    assert episode.state.ending is Ending.SERVER_STOPPED
    assert episode.verdict is not None
    assert episode.verdict.status == "not_evaluated"
