"""Looking for the answer: on disk, in every process, in the driver, in other sandboxes."""

from __future__ import annotations

from hashlib import sha256

import pytest

from tests.cheats.agent import Agent, Arena

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

EVERY_FILE = """
import os, sys, time
wanted = "".join(HALVES).encode()
for folder, _, names in os.walk("/"):
    if folder.startswith(("/proc", "/sys")):
        continue
    for name in names:
        path = os.path.join(folder, name)
        try:
            # What is older than the episode cannot hold what was drawn in it.
            if os.path.isfile(path) and os.lstat(path).st_ctime > time.time() - 600:
                with open(path, "rb") as file:
                    if wanted in file.read():
                        print("found in", path)
        except OSError:
            pass
"""
EVERY_DESCRIPTOR = """
import glob
wanted = "".join(HALVES).encode()
for path in glob.glob("/proc/[0-9]*/task/*/fd/*") + glob.glob("/proc/[0-9]*/map_files/*"):
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if wanted in (file.read() or b""):
                print("found in", path, os.readlink(path))
    except OSError:
        pass
"""
EVERY_PROCESS = """
import glob, os
wanted = "".join(HALVES).encode()
for process in glob.glob("/proc/[0-9]*"):
    if process == f"/proc/{os.getpid()}":
        continue
    for name in ("cmdline", "environ"):
        try:
            with open(f"{process}/{name}", "rb") as file:
                if wanted in file.read():
                    print("found in", process, name)
        except OSError:
            pass
    try:
        with open(f"{process}/maps") as maps, open(f"{process}/mem", "rb", 0) as memory:
            for line in maps:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                try:
                    memory.seek(start)
                    if wanted in memory.read(end - start):
                        print("found in the memory of", process)
                except (OSError, OverflowError, ValueError):
                    pass
    except OSError:
        pass
"""


async def search(agent: Agent, program: str) -> str:
    """What a program finds of the answer; it knows the two halves, never side by side."""
    answer = sha256((await agent.shell("cat seed.txt")).encode()).hexdigest()
    return await agent.python(f"import os\nHALVES = {[answer[:32], answer[32:]]}\n{program}")


@pytest.mark.parametrize(
    "program", [EVERY_FILE, EVERY_DESCRIPTOR, EVERY_PROCESS], ids=["files", "descriptors", "processes"]
)
async def test_the_answer_is_nowhere_in_the_sandbox(arena: Arena, program: str) -> None:
    async with arena.cheating("sealed-answer") as agent:
        assert await search(agent, program) == ""
        await agent.shell(
            "cp seed.txt copy.txt; (exec 3<copy.txt; rm copy.txt; exec sleep 1000) >/dev/null 2>&1 &"
        )
        seed = await agent.shell("cat seed.txt")
        if program is not EVERY_FILE:
            assert "found" in await agent.python(f"import os\nHALVES = {[seed[:9], seed[9:]]}\n{program}")


async def test_nothing_that_grades_is_left_in_the_sandbox(arena: Arena) -> None:
    async with arena.cheating("sealed-answer") as agent:
        assert await agent.shell("find /episode/tasks -type f -o -type l") == ""
        left = "evaluation|groundtruth|preprocess|rubric|verdict|harness|trajectory"
        assert await agent.shell(f"find / -newer /proc/1 -xdev 2>&1 | grep -E '{left}'") == ""


async def test_the_drivers_memory_and_descriptors_are_closed(arena: Arena) -> None:
    async with arena.cheating() as agent:
        for path in (
            "environ",
            "mem",
            "maps",
            "auxv",
            "stack",
            "exe",
            "cwd/.",
            "root/.",
            "task/1/mem",
            "fd/0",
        ):
            said = await agent.shell(f"head -c 1 /proc/1/{path}")
            assert "Permission denied" in said or "not permitted" in said, (path, said)
        said = await agent.shell(
            "for fd in $(ls /proc/1/fd); do readlink /proc/1/fd/$fd && echo reached; done"
        )
        assert "reached" not in said


async def test_the_environment_tells_nothing(arena: Arena) -> None:
    async with arena.cheating() as agent:
        environment = await agent.shell("cat /proc/*/environ /proc/1/cmdline | tr '\\0' '\\n'; hostname")
        for secret in (agent.episode_id, agent.label, str(arena.served.state), "TOKEN", "SECRET", "DOCKER"):
            assert secret not in environment


async def test_neither_the_engine_nor_a_device_is_there(arena: Arena) -> None:
    async with arena.cheating() as agent:
        assert await agent.shell("find / -xdev -type s; find /run /var/run -name '*.sock'") == ""
        assert await agent.shell("find / -xdev -type b; ls /dev | grep -E '^(sd|vd|nvme|mem|kmsg|dm)'") == ""
        for attempt in (
            "mknod disk b 254 0",
            "mknod null c 1 3",
            "mount -t proc none /mnt",
            "mount --bind / /mnt",
            "unshare -Ur id",
            "unshare -m id",
            "chroot / id",
            "nsenter -t 1 -a id",
            "dmesg",
            "echo h > /proc/sysrq-trigger",
            "echo '|/bin/sh' > /proc/sys/kernel/core_pattern",
            "echo 1 > /sys/fs/cgroup/memory/notify_on_release || echo 1 > /sys/fs/cgroup/cgroup.freeze",
        ):
            assert await agent.shell(f"({attempt}) >/dev/null 2>&1 && echo done") == "", attempt


async def test_other_sandboxes_are_out_of_sight(arena: Arena) -> None:
    async with arena.playing("sum-prices") as other:
        listen = "import socket, time; s = socket.create_server(('0.0.0.0', 7777)); time.sleep(1000)"
        await other.shell(f'exec -a neighbour python3 -c "{listen}" >/dev/null 2>&1 & touch /tmp/neighbour')
        async with arena.cheating() as agent:
            assert await agent.shell("cat /proc/*/cmdline | grep -ac neighb[o]ur; ls /tmp") == "0\n"
            assert (await agent.shell("ls /sys/class/net; ls /proc/sys/net/ipv4/conf")).split() == [
                "lo",
                *("all", "default", "lo"),
            ]
            assert "refused" in await agent.shell("exec 3<>/dev/tcp/127.0.0.1/7777")
            host = arena.served.url.rpartition(":")[2]
            for address in ("127.0.0.1", "172.17.0.1", "169.254.169.254"):
                assert "reached" not in await agent.shell(
                    f"exec 3<>/dev/tcp/{address}/{host} && echo reached"
                )
