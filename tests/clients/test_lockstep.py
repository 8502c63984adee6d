"""Locksteps: episodes played together, and failures that stay with their slot."""

from __future__ import annotations

import pytest
from decathlon_client import (
    Call,
    Decathlon,
    EpisodeEndedError,
    NoVerdictError,
    Reply,
    SetUpError,
    UnknownTaskError,
)

from decathlon_mcp.episodes.state import Phase
from tests.probe.serving import Served

pytestmark = pytest.mark.anyio


def texts(replies: list[Reply]) -> list[str]:
    return [reply.text for reply in replies]


async def test_slots_are_played_one_turn_at_a_time(d: Decathlon) -> None:
    async with d.lockstep(["find-answer"] * 3) as eps:
        first, second, third = eps
        write = ("probe__write", {"path": "answer.txt", "text": "42"})
        replies = await eps.call(
            {first: [write, ("claim_done", {})], second: [("probe__echo", {"text": "2"})]}
        )
        assert texts(replies[second]) == ["2"]
        assert len(replies[first]) == 2
        assert eps.live == [second, third]
        verdicts = await eps.evaluate()
        assert [verdict and verdict.reward for verdict in verdicts] == [1.0, 0.0, 0.0]
        assert await eps.evaluate() == verdicts
        assert eps.live == []


async def test_an_episode_that_cannot_be_opened_does_not_affect_the_others(served: Served) -> None:
    tasks = ["failing-preprocess", "find-answer", "no-such-task", "lost-verdict"]
    async with Decathlon(served.url) as d, d.lockstep(tasks, tries=1) as eps:
        broken, sound, unknown, crashing = eps
        assert isinstance(broken.failure, SetUpError)
        assert isinstance(unknown.failure, UnknownTaskError)
        with pytest.raises(SetUpError):
            _ = broken.episode
        assert eps.live == [sound, crashing]
        echo = ("probe__echo", {"text": "here"})
        replies = await eps.call({slot: [echo] for slot in eps})
        assert [texts(replies[slot]) for slot in eps] == [[], ["here"], [], ["here"]]
        rewards = [verdict and verdict.reward for verdict in await eps.evaluate()]
        assert rewards == [None, 0.0, None, None]
        assert isinstance(crashing.failure, NoVerdictError)


async def test_an_episode_that_ends_early_is_its_slots_failure(served: Served) -> None:
    async with Decathlon(served.url) as d, d.lockstep(["find-answer"] * 2) as eps:
        lost, kept = eps
        episode = next(each for each in served.episodes.live if each.id == lost.episode.id)
        episode.close()
        await episode.state.reach(Phase.ENDED)
        echo = ("probe__echo", {"text": "here"})
        replies = await eps.call({lost: [echo, echo], kept: [echo, echo]})
        assert [texts(replies[slot]) for slot in eps] == [[], ["here", "here"]]
        assert isinstance(lost.failure, EpisodeEndedError)
        assert eps.live == [kept]


async def test_a_models_mistakes_are_error_replies(served: Served) -> None:
    mistakes: list[Call] = [
        ("probe__eccho", {"text": "hello"}),
        ("probe__refuse", None),
        ("probe__echo", '{"text": "half'),
        ("probe__echo", "[1]"),
        ("evaluate", {}),
    ]
    async with Decathlon(served.url) as d, d.lockstep(["find-answer"]) as eps:
        (slot,) = eps
        replies = (await eps.call({slot: [*mistakes, ("probe__echo", '{"text": "whole"}')]}))[slot]
        expected = ["probe__echo", "not today", "not JSON", "must be a JSON object", "no tool 'evaluate'"]
        for reply, part in zip(replies, expected, strict=False):
            assert reply.is_error
            assert part in reply.text
        assert replies[-1].text == "whole"
        slow = await eps.call({slot: [("probe__sleep", {"seconds": 100, "note": "late"})]}, timeout=0.3)
        assert slow[slot][0].is_error
        assert slot.is_live
