"""Honest work on the tasks of the cheats is rewarded."""

from __future__ import annotations

import pytest

from tests.cheats.agent import SOLUTIONS, CheatServer

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


@pytest.mark.parametrize(
    "task", sorted(SOLUTIONS.keys() - {"sum-prices"})
)  # which each server plays at its end
async def test_correct_answer_gets_the_full_reward(cheats: CheatServer, task: str) -> None:
    async with cheats.episode(task) as agent:
        if task == "last-words":
            await agent.echo("friend")
        else:
            await agent.shell(SOLUTIONS[task])
        await agent.claim("say")
        verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict


async def test_empty_attempt_gets_no_reward(cheats: CheatServer) -> None:
    """The attacks on the other tasks are attempts without honest work."""
    async with cheats.unrewarded_episode("last-words"):
        pass
