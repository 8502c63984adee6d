"""Contents of the workspace: they reach the grader as data, or they are refused."""

from __future__ import annotations

import pytest

from decathlon_mcp.plugins.conformance import files
from tests.cheats.agent import SOLUTIONS, STATES, CheatServer, replace_workspaces

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

ANSWER = "tasks/cheats/sum-prices/groundtruth_workspace/total.json"
"""In the grader this file has the content that the report should have."""

# tests/archives/test_workspace.py tests each kind of link, special file and name separately.
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
SPECIAL_FILES = {
    "fifo": """mkfifo report.json; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("s")'""",
    "folder": "mkdir report.json",
    "unreadable": "echo '{\"total\": 7}' > report.json; chmod 0 report.json .",
    "set-id": "cp /usr/bin/python3 report.json; chmod 7777 report.json",
    "hard-link-out-of-the-workspace": "ln /episode/configs/mcp_servers/root.yaml report.json",
    "many-hard-links": """echo '{}' > report.json
        python3 -c 'import os; [os.link("report.json", f"{n}.json") for n in range(2000)]'""",
}
NAMES = r"""
import os
names = [
    b"report.json\n", b"\nreport.json", b"\x1b[2J", b"\xff\xfe", b"\xed\xa0\x80", b"a\\..\\..\\b", b"...",
    b".. ", b" ", b"-rf", b"~", b"*", b"$(id)", b"%s%n", b"n" * 255, b"\xf0\x9f\x92\xa9" * 63,
    b".wh.prices.csv", b".wh..wh..opq", b"CON", b"a:b", b"@LongLink", b"\x7f", b"\x01",
    b"30 path=..escaped\n",
]
for name in names:
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
async def test_link_out_of_the_workspace_is_not_followed(cheats: CheatServer, link: str) -> None:
    async with cheats.unrewarded_episode() as agent:
        await agent.shell(link)


@pytest.mark.parametrize("workspace", WORKSPACES.values(), ids=WORKSPACES)
async def test_workspace_that_is_no_folder_is_graded_as_empty(cheats: CheatServer, workspace: str) -> None:
    async with cheats.unrewarded_episode() as agent:
        await agent.shell(f"cd ..; rm -rf workspace; {workspace}")


async def test_workspace_in_any_state_but_that_of_a_folder_is_graded_as_empty(
    cheats: CheatServer, provider: str
) -> None:
    # Bubblewrap copies files as local sandboxes in namespaces do, where each state is played.
    await replace_workspaces(cheats.served, STATES if provider == "docker" else files.STATES)


@pytest.mark.parametrize("special_file", SPECIAL_FILES.values(), ids=SPECIAL_FILES)
async def test_special_file_is_not_graded(cheats: CheatServer, special_file: str) -> None:
    async with cheats.unrewarded_episode() as agent:
        await agent.shell(special_file)


@pytest.mark.parametrize("program", [NAMES, DEEP], ids=["odd", "deep"])
async def test_unusual_file_names_do_not_affect_the_reward(cheats: CheatServer, program: str) -> None:
    """Honest work in the same workspace is rewarded."""
    async with cheats.episode("sum-prices") as agent:
        assert await agent.python(program) == ""
        await agent.shell(SOLUTIONS["sum-prices"])
        verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict


async def test_folders_too_deep_to_be_copied_pay_nothing(cheats: CheatServer) -> None:
    async with cheats.unrewarded_episode(or_forfeited=True) as agent:
        await agent.python("import os\nfor _ in range(1_500): os.mkdir('d'); os.chdir('d')")


async def test_workspace_with_thousands_of_files_is_graded(cheats: CheatServer) -> None:
    async with cheats.episode("sum-prices") as agent:
        await agent.python("import os\nfor n in range(5_000): os.mknod(f'{n}')")
        await agent.shell(SOLUTIONS["sum-prices"])
        verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict


@pytest.mark.parametrize(
    "command",
    [
        "truncate -s 1T report.json",
        "truncate -s 8E report.json || truncate -s 16000000M report.json",
        "head -c 70M /dev/urandom > report.json",
    ],
    ids=["sparse-terabyte", "sparse-giant", "flat"],
)
async def test_oversized_workspace_is_forfeited(cheats: CheatServer, command: str) -> None:
    async with cheats.unrewarded_episode(status="forfeited") as agent:
        await agent.shell(command)


async def test_refused_files_are_listed_in_the_verdict(cheats: CheatServer) -> None:
    async with cheats.episode("sum-prices") as agent:
        await agent.shell("mkfifo pipe; ln -s /etc/shadow shadow; cp /usr/bin/env id; chmod 4755 id")
        refused = (await agent.verdict())["refused"]
    assert [line.partition(":")[0] for line in sorted(refused)] == ["id", "pipe", "shadow"], refused
