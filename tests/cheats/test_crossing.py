"""What an agent may leave in its workspace: it crosses to the grader as data, or it does not cross."""

from __future__ import annotations

import pytest

from tests.cheats.agent import HONEST, Arena

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

ANSWER = "tasks/cheats/sum-prices/groundtruth_workspace/total.json"
"""In the grader it reads as the report should."""

# Every kind of link, stranger and name by itself: tests/archives/test_workspace.py.
LINKS = {
    "relative": f"ln -s ../{ANSWER} report.json",
    "through-a-parent": f"mkdir a b; ln -s ../a b/c; ln -s b/c/../../{ANSWER} report.json",
    "through-proc": f"ln -s /proc/self/cwd/{ANSWER} report.json",
    "to-the-root": f"ln -s / root; ln -s root/episode/{ANSWER} report.json",
    "in-a-loop": "ln -s other report.json; ln -s report.json other; ln -s . self; ln -s /dev/zero zero",
}
WORKSPACES = {
    "a-link-to-the-answers": f"ln -s /episode/{ANSWER.rpartition('/')[0]} workspace",
    "a-link-to-itself": "ln -s workspace workspace",
    "a-file": "echo nothing > workspace",
    "a-fifo": "mkfifo workspace",
    "nothing": "true",
}
STRANGERS = {
    "fifo": """mkfifo report.json; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("s")'""",
    "folder": "mkdir report.json",
    "unreadable": "echo '{\"total\": 7}' > report.json; chmod 0 report.json .",
    "set-id": "cp /usr/bin/python3 report.json; chmod 7777 report.json",
    "hard-link-to-the-outside": "ln /episode/configs/mcp_servers/root.yaml report.json",
    "hard-links-in-a-crowd": """echo '{}' > report.json
        python3 -c 'import os; [os.link("report.json", f"{n}.json") for n in range(2000)]'""",
}
NAMES = r"""
import os
odd = [
    b"report.json\n", b"\nreport.json", b"\x1b[2J", b"\xff\xfe", b"\xed\xa0\x80", b"a\\..\\..\\b", b"...",
    b".. ", b" ", b"-rf", b"~", b"*", b"$(id)", b"%s%n", b"n" * 255, b"\xf0\x9f\x92\xa9" * 63,
    b".wh.prices.csv", b".wh..wh..opq", b"CON", b"a:b", b"@LongLink", b"\x7f", b"\x01",
    b"30 path=..escaped\n",
]
for name in odd:
    os.mkdir(b"odd-" + name[:200])
    for place in (b".", b"odd-" + name[:200]):
        with open(os.path.join(place, name), "wb") as file:
            file.write(name)
        os.symlink(name, os.path.join(place, b"link-" + name[:200]))
"""
DEEP = """
import os
for name, levels in (("d", 600), ("d" * 99, 60), ("d" * 255, 20)):
    top = os.open(".", os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name)
        os.chdir(name)
        open("file", "w").close()
    os.fchdir(top)
"""


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
async def test_a_link_that_leads_out_is_not_followed(arena: Arena, link: str) -> None:
    async with arena.cheating() as agent:
        await agent.shell(link)


@pytest.mark.parametrize("workspace", WORKSPACES.values(), ids=WORKSPACES)
async def test_a_workspace_that_is_another_thing_is_an_empty_one(arena: Arena, workspace: str) -> None:
    async with arena.cheating() as agent:
        await agent.shell(f"cd ..; rm -rf workspace; {workspace}")


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
async def test_a_file_that_is_no_plain_file_is_none(arena: Arena, stranger: str) -> None:
    async with arena.cheating() as agent:
        await agent.shell(stranger)


@pytest.mark.parametrize("program", [NAMES, DEEP], ids=["odd", "deep"])
async def test_names_that_are_hard_to_bear_cost_nothing(arena: Arena, program: str) -> None:
    """Beside honest work, which is paid: nothing of it was lost, and nothing lies where it should not."""
    async with arena.playing("sum-prices") as agent:
        assert await agent.python(program) == ""
        await agent.shell(HONEST["sum-prices"])
        verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict


async def test_files_by_the_thousand_are_borne(arena: Arena) -> None:
    async with arena.playing("sum-prices") as agent:
        await agent.python("import os\nfor n in range(5_000): os.mknod(f'{n}')")
        await agent.shell(HONEST["sum-prices"])
        verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict


@pytest.mark.parametrize(
    "giant",
    [
        "truncate -s 1T report.json",
        "truncate -s 8E report.json || truncate -s 16000000M report.json",
        "head -c 70M /dev/urandom > report.json",
    ],
    ids=["sparse-terabyte", "sparse-giant", "flat"],
)
async def test_more_than_may_cross_does_not_cross(arena: Arena, giant: str) -> None:
    async with arena.cheating() as agent:
        await agent.shell(giant)


async def test_what_did_not_cross_is_told(arena: Arena) -> None:
    async with arena.playing("sum-prices") as agent:
        await agent.shell("mkfifo pipe; ln -s /etc/shadow shadow; cp /usr/bin/env id; chmod 4755 id")
        refused = (await agent.verdict())["refused"]
    assert [line.partition(":")[0] for line in sorted(refused)] == ["id", "pipe", "shadow"], refused
