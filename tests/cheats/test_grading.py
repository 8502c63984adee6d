"""Attacks on grading: it happens once, after the tools are closed, and breaking it gives a reward of 0."""

from __future__ import annotations

import json
import re
from typing import Any

import anyio
import httpx2
import pytest

from tests.cheats.agent import SOLUTIONS, CheatServer
from tests.probe.clients import refused

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

REPORTS = [
    f"program-{name}"
    for name in ("prints-success", "writes-to-descriptors", "reaches-into-others", "fills-memory")
]


@pytest.mark.parametrize("name", REPORTS)
async def test_program_run_by_the_evaluator_cannot_report_a_result(cheats: CheatServer, name: str) -> None:
    async with cheats.unrewarded_episode("run-program") as agent:
        await agent.attack(name, "run-program", outputs=["double.py"])


ATTACKS = {
    "program-never-ends": ("await-program", "loop.py", "did not end in time"),
    # The processes can leave the driver no time to answer; gVisor can hang up the evaluator among them.
    "program-forks": (
        "await-program",
        "loop.py",
        "did not end in time|no answer to run|was killed: signal 1$",
    ),
    "program-kills-its-parent": ("run-program", "double.py", "was killed: signal 9"),
    "program-kills-all": ("run-program", "double.py", "was killed: signal 9"),
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_breaking_or_blocking_the_evaluator_forfeits_the_attempt(
    cheats: CheatServer, name: str
) -> None:
    task, program, reason = ATTACKS[name]
    async with cheats.unrewarded_episode(task, status="forfeited") as agent:
        await agent.attack(name, task, outputs=[program])
        verdict = await agent.verdict()
        assert re.search(reason, verdict["detail"])
        assert verdict["success"] is False
        assert await agent.verdict() == verdict


CRASHES = {
    "crash-cut-off": ("sum-prices", "report.json", "json.decoder.JSONDecodeError: "),
    "program-prints-no-text": (
        "run-program",
        "double.py",
        "evaluation/evaluator.py:evaluate: UnicodeDecodeError: ",
    ),
}


@pytest.mark.parametrize("name", CRASHES)
async def test_crashing_the_evaluator_pays_nothing(cheats: CheatServer, name: str) -> None:
    task, file, uncaught = CRASHES[name]
    async with cheats.unrewarded_episode(task) as agent:
        await agent.attack(name, task, outputs=[file])
        verdict = await agent.verdict()
        assert verdict["uncaught"].startswith(uncaught), verdict


@pytest.mark.parametrize("answer", ["\ud800", "a\0b"], ids=["surrogate", "nul"])
async def test_odd_text_in_an_answer_does_not_cost_the_verdict(cheats: CheatServer, answer: str) -> None:
    """The answer is written into files next to the verdict. JSON has escapes for what UTF-8 cannot encode."""
    async with cheats.unrewarded_episode() as agent, httpx2.AsyncClient() as client:
        await agent.shell("true")
        address = cheats.served.episode(agent.episode_id)
        call = {"name": "claim_done", "arguments": {"answer": answer}}
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        await client.post(address, content=json.dumps(request), headers=headers)


async def test_tools_are_refused_during_and_after_grading(cheats: CheatServer) -> None:
    """A hundred calls of `evaluate` give one verdict, on the workspace as it was at the first one."""
    verdicts: list[str] = []
    graded = anyio.Event()
    async with cheats.episode("sum-prices") as agent:

        async def evaluate() -> None:
            verdicts.append(json.dumps(await agent.verdict(), sort_keys=True))
            graded.set()

        async def tool_works() -> bool:
            call = {"command": SOLUTIONS["sum-prices"]}
            result: Any = await agent.client.call_tool("root__shell", call)
            return not result.is_error

        tries = 0
        await agent.claim()
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(evaluate)
            while not graded.is_set():
                assert not await tool_works()
                tries += 1
        assert not await tool_works()
    assert (len(verdicts), len(set(verdicts)), tries > 0) == (100, 1, True)
    verdict = json.loads(verdicts[0])
    assert (verdict["status"], verdict["reward"]) == ("scored", 0.0)


async def test_arguments_of_evaluate_do_not_change_the_verdict(cheats: CheatServer) -> None:
    """Unknown arguments of `evaluate` and `claim_done` are refused, and their `_meta` is ignored."""
    forged: dict[str, Any] = {"reward": 1.0, "success": True, "status": "scored", "metrics": {"doubles": 1}}
    async with cheats.unrewarded_episode("run-program") as agent:
        for tool in ("claim_done", "evaluate"):
            assert "unknown argument" in await refused(agent.client, tool, **forged)
        meta: Any = {"example.org/verdict": forged, **forged}
        await agent.client.call_tool("claim_done", {"answer": json.dumps(forged)}, meta=meta)
        await agent.client.call_tool("evaluate", {}, meta=meta)
