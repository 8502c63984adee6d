"""Processes that try to survive the claim: all are killed before the workspace is captured."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cheats.agent import CheatServer
from tests.probe.leftovers import processes_in_group

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

LATE_WRITER = """
import glob, os, time
def tools_live():
    return any(b"root_server" in open(path, "rb").read() for path in glob.glob("/proc/[0-9]*/cmdline"))
def work():
    while tools_live():
        time.sleep(0.01)
    # Longer than the freeze takes: a survivor writes during grading.
    time.sleep(6)
    while True:
        open("/episode/workspace/report.json", "w").write('{"total": 70}')
"""
SURVIVORS = {
    "daemon": """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        os.environ.clear()
        os.execv("/usr/bin/python3", ["[kworker/0:1]", "-c", LATE_WRITER + "work()"])
""",
    "respawning": """
if os.fork() == 0:
    os.setsid()
    while True:
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork() == 0:
                while True:
                    if os.fork():
                        os._exit(0)
            work()
        os.waitpid(child, 0)
""",
    "guards": """
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        while True:
            if (child := os.fork()) == 0:
                work()
            os.waitpid(child, 0)
""",
    "traced": """
import ctypes
libc = ctypes.CDLL(None)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        libc.ptrace(0, 0, 0, 0)
        work()
    while True:
        _, status = os.wait()
        libc.ptrace(7, _, 0, 0)
""",
    "asleep": """
if os.fork() == 0:
    os.setsid()
    if (child := os.vfork() if hasattr(os, "vfork") else os.fork()) == 0:
        work()
    os.kill(child, 19)
    work()
""",
    "tools-stopped": """
import signal
if os.fork() == 0:
    os.setsid()
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        if b"root_server" in open(path, "rb").read():
            os.kill(int(path.split("/")[2]), signal.SIGSTOP)
    work()
time.sleep(0.1)
""",
}


@pytest.mark.parametrize("program", SURVIVORS.values(), ids=SURVIVORS)
async def test_no_process_survives_the_claim(
    cheats: CheatServer, provider: str, docker_engine: Any, program: str
) -> None:
    async with cheats.unrewarded_episode() as agent:
        background = f"LATE_WRITER = {LATE_WRITER!r}\n{LATE_WRITER}\nif os.fork() == 0:\n    os.setsid()"
        lines = "".join(f"    {line}\n" for line in program.splitlines())
        await agent.python(f"{background}\n{lines}")
        await agent.claim()
        await agent.verdict()
        name = f"{agent.public_id}-agent"
        if provider == "docker":
            label = {"label": f"decathlon.sandbox={name}"}
            assert docker_engine.containers(all=True, filters=label) == []
        else:
            assert not processes_in_group(f"-{name}")
