"""Answers that a preprocess script leaves outside of the workspace: none reaches the agent."""

from __future__ import annotations

import pytest

from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import SetUpError
from tests.cheats.agent import SOLUTIONS, Agent, CheatServer
from tests.cheats.test_secrets import SEARCH_PROCESSES
from tests.cheats.test_secrets import search as search_by

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

FEWEST = {
    "docker": {"scratch": 27, "others": 35},
    "image": {"scratch": 19, "others": 16},
    "gvisor": {"scratch": 19, "others": 16},
}
"""Numbers of ways in which preprocess can leave an answer, in scratch folders and elsewhere, in any image.

There are fewer where the image's own folders are read-only.
"""
SEARCH = """
import ctypes, os, sys
answer = "".join(HALVES)
found = []

def look(path, name):
    status = os.lstat(path)
    texts = [os.fsencode(name)]
    times = {int(status.st_mtime), int(status.st_atime)}
    if times & {int(answer[:8], 16), int(answer[8:16], 16)}:
        found.append(f"time of {path}")
    if os.path.islink(path):
        texts.append(os.fsencode(os.readlink(path)))
    elif os.path.isfile(path) and status.st_size < 1 << 24:
        with open(path, "rb") as file:
            texts.append(file.read())
    for attribute in os.listxattr(path, follow_symlinks=False):
        texts.append(os.getxattr(path, attribute, follow_symlinks=False))
    if any(part.encode() in text for text in texts for part in (answer, answer[:40])):
        found.append(path)

for folder, folders, names in os.walk("/"):
    if folder == "/":
        folders.remove("proc")
    for name in (*folders, *names):
        try:
            look(os.path.join(folder, name), name)
        except OSError:
            pass
libc = ctypes.CDLL(None)
# SHM_INFO, MSG_INFO and SEM_INFO, and where the answer has the number of objects.
for call, arguments, position in (
    (libc.shmctl, (0, 14), 0), (libc.msgctl, (0, 12), 0), (libc.semctl, (0, 0, 19), 7)
):
    counts = (ctypes.c_int * 64)()
    if call(*arguments, counts) < 0 or counts[position]:
        found.append(f"{call.__name__}: {counts[position]}")
with open("/proc/net/unix") as file:
    found += [line for line in file if answer in line]
if libc.syscall(250, 10, -4, b"user", b"notes", 0) > 0:  # keyctl(KEYCTL_SEARCH) on x86-64
    found.append("key")
print("\\n".join(found), end="")
"""


def skip_many_files(provider: str) -> None:
    if provider not in FEWEST:
        pytest.skip("a search of all of this machine's files takes minutes")


async def search(agent: Agent) -> str:
    """Search all files, IPC objects, sockets and processes for the answer; returns what has it."""
    return await search_by(agent, SEARCH) + await search_by(agent, SEARCH_PROCESSES)


async def ways(agent: Agent, kind: str) -> list[str]:
    """The ways of this kind in which preprocess has left its answer."""
    return (await agent.shell(f"cat {kind}.txt")).splitlines()


async def test_answers_left_by_preprocess_do_not_reach_the_agent(cheats: CheatServer, provider: str) -> None:
    skip_many_files(provider)
    async with cheats.unrewarded_episode("scattered-answer") as agent:
        for kind, number in FEWEST[provider].items():
            assert len(await ways(agent, kind)) >= number
        assert await ways(agent, "impossible") == []
        assert await search(agent) == ""
        # The search does find answers.
        await agent.shell("sha256sum seed.txt | cut -c 1-64 > /root/copy; mkdir /dev/shm/$(cat /root/copy)")
        answer = (await agent.shell("cat /root/copy")).strip()
        assert {*(await search_by(agent, SEARCH)).split()} == {f"/dev/shm/{answer}", "/root/copy"}


async def test_honest_work_is_rewarded_after_a_careless_preprocess(cheats: CheatServer) -> None:
    for task in ("scattered-answer", "scratched-answer"):
        async with cheats.episode(task) as agent:
            await agent.shell(SOLUTIONS["sealed-answer"])
            verdict = await agent.verdict()
            assert (verdict["status"], verdict["reward"]) == ("scored", 1.0), verdict


async def test_scratch_folders_are_cleared_where_processes_of_preprocess_continue(
    cheats: CheatServer, provider: str
) -> None:
    skip_many_files(provider)
    async with cheats.unrewarded_episode("scratched-answer") as agent:
        assert len(await ways(agent, "scratch")) >= FEWEST[provider]["scratch"]
        assert await search(agent) == ""
        get = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/').read().decode())"
        assert await agent.python(get) == "a page of the task\n"


async def test_preprocess_that_changes_the_agents_sandbox_fails_the_set_up(cheats: CheatServer) -> None:
    async with cheats.episode("scattered-answer") as agent:
        others = await ways(agent, "others")
    episode = cheats.served.episodes.start("spilled-answer", Principal())
    with pytest.raises(SetUpError, match="preprocess left changes that the agent could read") as failed:
        await episode.ready()
    paths, _, rest = failed.value.message.partition(": ")[2].partition(" and ")
    assert len(paths.split(", ")) + int(rest.split()[0]) == len(others)
    assert await cheats.bystander.echo("well") == "well"


async def test_whatever_preprocess_leaves_in_the_workspace_reaches_the_agent(cheats: CheatServer) -> None:
    async with cheats.episode("stashed-answer") as agent:
        await agent.shell(
            "cd library && git cat-file --batch-all-objects --batch-check | cut -d ' ' -f 1 "
            "| xargs -n 1 git cat-file -p | grep -E '^[0-9a-f]{64}$' > ../answer.txt"
        )
        verdict = await agent.verdict()
        assert (verdict["status"], verdict["reward"]) == ("scored", 1.0), verdict
        assert await cheats.bystander.echo("well") == "well"
