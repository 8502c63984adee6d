"""The judging itself: it happens once, behind a closed door, and what breaks it earns nothing."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from mcp.shared.exceptions import MCPError

from tests.cheats.agent import HONEST, Arena

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

SAYS_SO = """
import json, sys
for file in (sys.stdout, sys.stderr):
    said = {"doubles": 1.0, "reward": 1, "success": True, "pass": True, "status": "scored"}
    print(json.dumps(said), "SUCCESS", "reward: 1", "reward=1.0", "exit code 0", sep="\\n", file=file)
"""
REACHES = """
import glob, json, os
for path in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "wb", 0) as file:
            file.write(json.dumps({"doubles": 1.0}).encode())
    except OSError:
        pass
"""
HANGS = "while True: pass"
KILLS = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
KILLS_ALL = "import os, signal; os.kill(-1, signal.SIGKILL)"
FORKS = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.1)
"""
HOARDS = """
hoard = []
while True:
    hoard.append(b"x" * (1 << 20))
"""


def left(name: str, program: str) -> str:
    """Leaves a program that an evaluator will run."""
    return f"open('{name}.py', 'w').write({program!r})"


@pytest.mark.parametrize("program", [SAYS_SO, REACHES, HOARDS], ids=["says-so", "reaches", "hoards"])
async def test_what_the_evaluator_runs_cannot_speak_for_it(arena: Arena, program: str) -> None:
    async with arena.cheating("run-program") as agent:
        await agent.python(left("double", program))


BREAKERS = {
    "hangs": ("await-program", "loop", HANGS, "timeout"),
    "forks": ("await-program", "loop", FORKS, "timeout"),
    "kills-its-parent": ("run-program", "double", KILLS, "evaluator_error"),
    "kills-all": ("run-program", "double", KILLS_ALL, "evaluator_error"),
}


@pytest.mark.parametrize(("task", "name", "program", "status"), BREAKERS.values(), ids=BREAKERS)
async def test_an_evaluator_that_is_broken_or_held_up_gives_no_reward(
    arena: Arena, task: str, name: str, program: str, status: str
) -> None:
    async with arena.playing(task) as agent:
        await agent.python(left(name, program))
        verdict = await agent.verdict()
        assert (verdict["status"], "reward" in verdict, "success" in verdict) == (status, False, False), (
            verdict
        )
        assert await agent.verdict() == verdict
    assert await arena.neighbour.say("well") == "well"


async def test_nobody_acts_while_it_is_judged_nor_after(arena: Arena) -> None:
    """A hundred askings are one judgement, of what there was when the first came."""
    verdicts: list[str] = []
    judged = anyio.Event()
    async with arena.playing("sum-prices") as agent:

        async def ask() -> None:
            verdicts.append(json.dumps(await agent.verdict(), sort_keys=True))
            judged.set()

        async def act() -> bool:
            call = {"command": HONEST["sum-prices"]}
            result: Any = await agent.client.call_tool("root__shell", call)
            return not result.is_error

        tries = 0
        await agent.claim()
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(ask)
            while not judged.is_set():
                assert not await act()
                tries += 1
        assert not await act()
    assert (len(verdicts), len(set(verdicts)), tries > 0) == (100, 1, True)
    verdict = json.loads(verdicts[0])
    assert (verdict["status"], verdict["reward"]) == ("scored", 0.0)


async def test_what_is_asked_of_the_judge_changes_nothing(arena: Arena) -> None:
    """Arguments of `evaluate` and `claim_done` are a player's words, not a judge's."""
    words: dict[str, Any] = {"reward": 1.0, "success": True, "status": "scored", "metrics": {"doubles": 1}}
    async with arena.cheating("run-program") as agent:
        for tool in ("claim_done", "evaluate"):
            with pytest.raises(MCPError, match="unknown argument"):
                await agent.client.call_tool(tool, words)
        meta: Any = {"example.org/verdict": words, **words}
        await agent.client.call_tool("claim_done", {"answer": json.dumps(words)}, meta=meta)
        await agent.client.call_tool("evaluate", {}, meta=meta)
