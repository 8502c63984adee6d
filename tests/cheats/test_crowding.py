"""Taking more than one's share: what runs out is the sandbox's own, and nobody else goes without."""

from __future__ import annotations

import pytest

from tests.cheats.agent import Arena

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

FORKS = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.1)
"""
MEMORY = """
import os
for _ in range(4):
    if os.fork() == 0:
        hoard = []
        while True:
            hoard.append(b"x" * (1 << 20))
try:
    while True:
        os.wait()
except ChildProcessError:
    print("all are gone")
"""
BLAME = "for file in /proc/1/oom_score_adj /proc/$PPID/oom_score_adj; do echo 1000 > $file; done"
DISK = """
import errno, os
for folder in ("/tmp", "/dev/shm"):
    written = 0
    try:
        with open(f"{folder}/hoard", "wb", 0) as file:
            while written < 4 << 30:
                written += file.write(b"x" * (1 << 20))
    except OSError as error:
        print(folder, errno.errorcode[error.errno])
    os.unlink(f"{folder}/hoard")
"""
CALLS = """
import os
for fd in (1, 2):
    for _ in range(32):
        os.write(fd, b"x" * (1 << 20))
"""


async def test_processes_run_out_for_the_agent_alone(arena: Arena) -> None:
    async with arena.cheating() as agent:
        await agent.python(FORKS)
        assert await arena.neighbour.shell("echo as ever") == "as ever\n"


async def test_memory_runs_out_for_the_agent_alone(arena: Arena) -> None:
    async with arena.cheating() as agent:
        assert await agent.python(MEMORY) == "all are gone\n"
        assert await arena.neighbour.shell("echo as ever") == "as ever\n"
        assert await agent.say("heard") == "heard"


async def test_who_has_the_driver_killed_in_its_place_gets_no_reward(arena: Arena) -> None:
    """It is the agent's own line that ends: an error, for which nobody is paid."""
    async with arena.playing("sum-prices") as agent:
        await agent.shell(BLAME)
        await agent.client.call_tool("root__python", {"code": MEMORY})
        verdict = await agent.verdict()
        assert verdict.get("reward", 0.0) == 0.0, verdict
        assert await arena.neighbour.shell("echo as ever") == "as ever\n"


async def test_scratch_space_runs_out_for_the_agent_alone(arena: Arena) -> None:
    async with arena.cheating() as agent:
        said = await agent.python(DISK)
        assert said == "/tmp ENOSPC\n/dev/shm ENOSPC\n", said
        assert await arena.neighbour.shell("echo as ever > /tmp/file; cat /tmp/file") == "as ever\n"


async def test_words_run_out_for_the_agent_alone(arena: Arena) -> None:
    """Replies and logs of many megabytes: cut, or an error, and the next call is answered."""
    async with arena.cheating() as agent:
        await agent.python(CALLS)
        assert await agent.say("heard") == "heard"
        assert await arena.neighbour.say("as ever") == "as ever"
