"""Searching for answers and secrets: on disk, in processes, in the driver, in other sandboxes."""

from __future__ import annotations

from hashlib import sha256

import pytest

from tests.cheats.agent import Agent, CheatServer

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

SEARCH_FILES = """
import os, sys, time
answer = "".join(HALVES).encode()
for folder, _, names in os.walk("/"):
    if folder.startswith(("/proc", "/sys")):
        continue
    for name in names:
        path = os.path.join(folder, name)
        try:
            # The answer was drawn in this episode, so that older files cannot contain it.
            if os.path.isfile(path) and os.lstat(path).st_ctime > time.time() - 600:
                with open(path, "rb") as file:
                    if answer in file.read():
                        print("found in", path)
        except OSError:
            pass
"""
SEARCH_DESCRIPTORS = """
import glob
answer = "".join(HALVES).encode()
for path in glob.glob("/proc/[0-9]*/task/*/fd/*") + glob.glob("/proc/[0-9]*/map_files/*"):
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if answer in (file.read() or b""):
                print("found in", path, os.readlink(path))
    except OSError:
        pass
"""
SEARCH_PROCESSES = """
import glob, os
answer = "".join(HALVES).encode()
for process in glob.glob("/proc/[0-9]*"):
    if process == f"/proc/{os.getpid()}":
        continue
    for name in ("cmdline", "environ"):
        try:
            with open(f"{process}/{name}", "rb") as file:
                if answer in file.read():
                    print("found in", process, name)
        except OSError:
            pass
    try:
        with open(f"{process}/maps") as maps, open(f"{process}/mem", "rb", 0) as memory:
            for line in maps:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                try:
                    memory.seek(start)
                    content = b""
                    # gVisor gives a part at a time.
                    while chunk := memory.read(end - start - len(content)):
                        content += chunk
                    if answer in content:
                        print("found in the memory of", process)
                except (OSError, OverflowError, ValueError):
                    pass
    except OSError:
        pass
"""


async def search(agent: Agent, program: str) -> str:
    """Run a program that searches for the answer; returns what it printed."""
    # The program gets two halves: it must not find the answer in its own source.
    answer = sha256((await agent.shell("cat seed.txt")).encode()).hexdigest()
    return await agent.python(f"import os\nHALVES = {[answer[:32], answer[32:]]}\n{program}")


async def test_answer_is_nowhere_in_the_sandbox(cheats: CheatServer) -> None:
    programs = (SEARCH_FILES, SEARCH_DESCRIPTORS, SEARCH_PROCESSES)
    async with cheats.unrewarded_episode("sealed-answer") as agent:
        for program in programs:
            assert await search(agent, program) == ""
        await agent.shell(
            "cp seed.txt copy.txt; (exec 3<copy.txt; rm copy.txt; SEED=$(cat seed.txt) exec sleep 1000) "
            ">/dev/null 2>&1 &"
        )
        seed = await agent.shell("cat seed.txt")
        for program in programs[1:]:
            assert "found" in await agent.python(f"import os\nHALVES = {[seed[:9], seed[9:]]}\n{program}")


async def test_no_grading_file_is_in_the_sandbox(cheats: CheatServer) -> None:
    async with cheats.unrewarded_episode("sealed-answer") as agent:
        assert await agent.shell("find /episode/tasks -type f -o -type l") == ""
        names = "evaluation|groundtruth|preprocess|rubric|verdict|harness|trajectory"
        assert await agent.shell(f"find / -newer /proc/1 -xdev 2>&1 | grep -E '{names}'") == ""


async def test_memory_and_descriptors_of_the_driver_are_inaccessible(cheats: CheatServer) -> None:
    async with cheats.unrewarded_episode() as agent:
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
            output = await agent.shell(f"head -c 1 /proc/1/{path}")
            # gVisor has no `stack`.
            refused = ("Permission denied", "not permitted", *["No such file"] * (path == "stack"))
            assert any(text in output for text in refused), (path, output)
        output = await agent.shell(
            "for fd in $(ls /proc/1/fd); do readlink /proc/1/fd/$fd && echo reached; done"
        )
        assert "reached" not in output


async def test_environment_has_no_secrets(cheats: CheatServer) -> None:
    async with cheats.unrewarded_episode() as agent:
        environment = await agent.shell("cat /proc/*/environ /proc/1/cmdline | tr '\\0' '\\n'; hostname")
        for secret in (
            agent.episode_id,
            agent.public_id,
            str(cheats.served.state),
            "TOKEN",
            "SECRET",
            "DOCKER",
        ):
            assert secret not in environment


async def test_engine_sockets_and_devices_are_not_in_the_sandbox(cheats: CheatServer) -> None:
    async with cheats.unrewarded_episode() as agent:
        assert await agent.shell("find / -xdev -type s; find /run /var/run/ -name '*.sock' 2>/dev/null") == ""
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


async def test_other_sandboxes_are_invisible(cheats: CheatServer) -> None:
    async with cheats.episode("sum-prices") as other:
        listen = "import socket, time; s = socket.create_server(('0.0.0.0', 7777)); time.sleep(1000)"
        await other.shell(f'exec -a neighbour python3 -c "{listen}" >/dev/null 2>&1 & touch /tmp/neighbour')
        async with cheats.unrewarded_episode() as agent:
            assert await agent.shell("cat /proc/*/cmdline | grep -ac neighb[o]ur; ls /tmp") == "0\n"
            interfaces = "import socket; print([name for _, name in socket.if_nameindex()])"
            assert await agent.python(interfaces) == "['lo']\n"
            assert "refused" in await agent.shell("exec 3<>/dev/tcp/127.0.0.1/7777")
            host = cheats.served.url.rpartition(":")[2]
            for address in ("127.0.0.1", "172.17.0.1", "169.254.169.254"):
                assert "reached" not in await agent.shell(
                    f"exec 3<>/dev/tcp/{address}/{host} && echo reached"
                )
