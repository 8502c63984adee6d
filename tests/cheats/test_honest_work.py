"""Honest work on the tasks of the cheats: it is rewarded, and an empty attempt is not."""

from __future__ import annotations

import pytest

from tests.cheats.agent import SOLUTIONS, CheatServer

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


@pytest.mark.parametrize("task", SOLUTIONS)
async def test_correct_answer_gets_the_full_reward(cheats: CheatServer, task: str) -> None:
    async with cheats.episode(task) as agent:
        if task == "last-words":
            await agent.echo("friend")
        else:
            await agent.shell(SOLUTIONS[task])
        await agent.claim("say")
        verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict


@pytest.mark.parametrize("task", SOLUTIONS)
async def test_empty_attempt_gets_no_reward(cheats: CheatServer, task: str) -> None:
    async with cheats.episode(task) as agent:
        verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 0.0), verdict
