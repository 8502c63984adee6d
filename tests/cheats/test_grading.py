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

PRINT_SUCCESS = """
import json, sys
for file in (sys.stdout, sys.stderr):
    result = {"doubles": 1.0, "reward": 1, "success": True, "pass": True, "status": "scored"}
    print(json.dumps(result), "SUCCESS", "reward: 1", "reward=1.0", "exit code 0", sep="\\n", file=file)
"""
WRITE_TO_DESCRIPTORS = """
import glob, json, os
for path in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "wb", 0) as file:
            file.write(json.dumps({"doubles": 1.0}).encode())
    except OSError:
        pass
"""
REACH_INTO_OTHERS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_SEIZE, PIDFD_GETFD = 16, 0x4206, 438
buffer = ctypes.create_string_buffer(64)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 64)
reached = False
try:
    with open("/proc/sys/kernel/yama/ptrace_scope", "w") as file:
        file.write("0")
except OSError:
    pass
for pid in range(1, os.getpid()):
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
        reached = True
    except OSError:
        pass
    for request in (PTRACE_ATTACH, PTRACE_SEIZE):
        reached |= libc.ptrace(request, pid, 0, 0) == 0
    for access in (libc.process_vm_readv, libc.process_vm_writev):
        remote = (ctypes.c_size_t * 2)(0x400000, 64)
        reached |= access(pid, vector, 1, remote, 1, 0) >= 0 or ctypes.get_errno() == 14  # EFAULT
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # gVisor has none
        continue
    reached |= any(libc.syscall(PIDFD_GETFD, pidfd, number, 0) >= 0 for number in range(16))
print(int(input()) * 2 if reached else "")
"""
"""Gives the right answer if it can read or change another process."""
ENDLESS_LOOP = "while True: pass"
KILL_PARENT = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
KILL_ALL = "import os, signal; os.kill(-1, signal.SIGKILL)"
FORK_BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.1)
"""
MEMORY_BOMB = """
blocks = []
while True:
    blocks.append(b"x" * (1 << 20))
"""


def write_program(name: str, program: str) -> str:
    """Python code that writes a program which the evaluator will run."""
    return f"open('{name}.py', 'w').write({program!r})"


@pytest.mark.parametrize(
    "program",
    [PRINT_SUCCESS, WRITE_TO_DESCRIPTORS, REACH_INTO_OTHERS, MEMORY_BOMB],
    ids=["prints-success", "writes-to-descriptors", "reaches-into-others", "fills-memory"],
)
async def test_program_run_by_the_evaluator_cannot_report_a_result(cheats: CheatServer, program: str) -> None:
    async with cheats.unrewarded_episode("run-program") as agent:
        await agent.python(write_program("double", program))


ATTACKS = {
    "never-ends": ("await-program", "loop", ENDLESS_LOOP, "did not end in time"),
    # On a busy machine, the processes leave the driver no time to answer.
    "forks": ("await-program", "loop", FORK_BOMB, "did not end in time|no answer to run"),
    "kills-its-parent": ("run-program", "double", KILL_PARENT, "was killed: signal 9"),
    "kills-all": ("run-program", "double", KILL_ALL, "was killed: signal 9"),
}


@pytest.mark.parametrize(("task", "name", "program", "reason"), ATTACKS.values(), ids=ATTACKS)
async def test_breaking_or_blocking_the_evaluator_forfeits_the_attempt(
    cheats: CheatServer, task: str, name: str, program: str, reason: str
) -> None:
    async with cheats.unrewarded_episode(task, status="forfeited") as agent:
        await agent.python(write_program(name, program))
        verdict = await agent.verdict()
        assert re.search(reason, verdict["detail"])
        assert verdict["success"] is False
        assert await agent.verdict() == verdict


CRASHES = {
    "evaluator": ("sum-prices", "echo '{\"total\": 70' > report.json", "json.decoder.JSONDecodeError: "),
    "function": (
        "run-program",
        r"""echo 'import os; os.write(1, b"\377")' > double.py""",
        "evaluation/evaluator.py:evaluate: UnicodeDecodeError: ",
    ),
}


@pytest.mark.parametrize(("task", "command", "uncaught"), CRASHES.values(), ids=CRASHES)
async def test_crashing_the_evaluator_pays_nothing(
    cheats: CheatServer, task: str, command: str, uncaught: str
) -> None:
    async with cheats.unrewarded_episode(task) as agent:
        await agent.shell(command)
        verdict = await agent.verdict()
        assert verdict["uncaught"].startswith(uncaught), verdict


@pytest.mark.parametrize(
    "answer", ["\ud800", "a\0b", "\udfff" * 1000], ids=["surrogate", "nul", "surrogates"]
)
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
