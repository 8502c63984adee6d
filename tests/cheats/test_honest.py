"""Honest work at the tasks that cheats are tried on: what is right is rewarded, what is not there is not."""

from __future__ import annotations

import pytest

from tests.cheats.agent import HONEST, Arena

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


@pytest.mark.parametrize("task", HONEST)
async def test_the_right_answer_gets_everything(arena: Arena, task: str) -> None:
    async with arena.playing(task) as agent:
        if task == "last-words":
            await agent.say("friend")
        else:
            await agent.shell(HONEST[task])
        await agent.claim("say")
        verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict


@pytest.mark.parametrize("task", HONEST)
async def test_an_empty_attempt_gets_nothing(arena: Arena, task: str) -> None:
    async with arena.playing(task) as agent:
        verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 0.0), verdict
