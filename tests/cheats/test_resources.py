"""Exhausting resources: it affects the agent's own sandbox only."""

from __future__ import annotations

from typing import Any

import pytest

from decathlon_mcp.plugins.audit.attacks import named
from tests.cheats.agent import SOLUTIONS, CheatServer

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

FILL_HOME = """
# In gVisor files remain when the driver has ended who wrote them: nothing else has the memory then. Each
# write doubles the file, so that the last one exceeds the limit by more than what is free without its writer.
import mmap, os
file = os.open(os.path.expanduser("~/large"), os.O_CREAT | os.O_RDWR | os.O_APPEND)
os.write(file, b"x" * (1 << 20))
while True:
    os.write(file, mmap.mmap(file, 0))
"""
SHARED_MEMORY_BOMB = named("driver-memory")["driver-memory"].program
KILLERS = {
    **dict.fromkeys(("docker", "image", "namespaces", "forks"), SHARED_MEMORY_BOMB),
    "gvisor": FILL_HOME,
}
"""Programs that end the driver of a sandbox, by provider."""
RAISE_OOM_SCORES = "for file in /proc/1/oom_score_adj /proc/$PPID/oom_score_adj; do echo 1000 > $file; done"


async def test_fork_bomb_affects_only_its_own_sandbox(cheats: CheatServer, provider: str) -> None:
    # In gVisor so many processes exceed the memory: on a busy machine before the driver can end some.
    async with cheats.unrewarded_episode(or_forfeited=provider == "gvisor") as agent:
        await agent.attack("bomb-forks")
        assert await cheats.bystander.shell("echo unaffected") == "unaffected\n"


async def test_memory_bomb_affects_only_its_own_sandbox(cheats: CheatServer) -> None:
    async with cheats.unrewarded_episode() as agent:
        assert await agent.attack("bomb-memory") == "all are gone\n"
        assert await cheats.bystander.shell("echo unaffected") == "unaffected\n"
        assert await agent.echo("alive") == "alive"


async def test_killing_the_driver_by_memory_forfeits_the_attempt(cheats: CheatServer, provider: str) -> None:
    """A reward of 0, not an error that a trainer leaves out, even for the right answer."""
    async with cheats.unrewarded_episode(status="forfeited") as agent:
        await agent.shell(SOLUTIONS["sum-prices"])
        await agent.shell(RAISE_OOM_SCORES)
        reply: Any = await agent.client.call_tool("root__python", {"code": KILLERS[provider]})
        while "out of memory" not in reply.content[0].text:
            # In gVisor the driver ends after the program that has filled the memory.
            assert provider == "gvisor" or reply.is_error, reply
            reply = await agent.client.call_tool("root__say", {"text": "alive"})
        verdict = await agent.verdict()
        assert "out of memory" in verdict["detail"], verdict
        assert await cheats.bystander.shell("echo unaffected") == "unaffected\n"


async def test_full_scratch_space_affects_only_its_own_sandbox(cheats: CheatServer) -> None:
    async with cheats.unrewarded_episode() as agent:
        output = await agent.attack("full-scratch-space")
        assert output == "/tmp ENOSPC\n/dev/shm ENOSPC\n", output
        assert await cheats.bystander.shell("echo unaffected > /tmp/file; cat /tmp/file") == "unaffected\n"


TAKE_INOTIFY = """
import ctypes, os, time
libc = ctypes.CDLL(None)
count = 0
while count < 10_000 and libc.inotify_init() >= 0:
    count += 1
if os.fork():
    print(count)
else:
    time.sleep(1000)
"""
HAS_INOTIFY = "import ctypes; print(ctypes.CDLL(None).inotify_init() >= 0)"


async def test_inotify_instances_taken_by_an_agent_are_free_after_its_episode(cheats: CheatServer) -> None:
    """The kernel counts them for each user, and all sandboxes that run as root are one user."""
    async with cheats.unrewarded_episode() as agent:
        assert int(await agent.python(TAKE_INOTIFY)) > 0
        assert await cheats.bystander.shell("echo unaffected > /tmp/file; cat /tmp/file") == "unaffected\n"
    assert await cheats.bystander.python(HAS_INOTIFY) == "True\n"


async def test_large_replies_and_logs_affect_only_their_own_episode(cheats: CheatServer) -> None:
    """Replies and logs of many megabytes are cut or refused, and the next call is answered."""
    async with cheats.unrewarded_episode() as agent:
        await agent.attack("long-reply")
        assert await agent.echo("alive") == "alive"
        assert await cheats.bystander.echo("unaffected") == "unaffected"
