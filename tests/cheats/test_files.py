"""Files that make a program which reads them run code, show other files, hang or exhaust its memory.

The evaluator of the task `read-files` reads them without precautions, in the workspace as current folder.
"""

from __future__ import annotations

import re

import pytest

from decathlon_mcp.plugins.audit.attacks import named
from tests.cheats.agent import CheatServer

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

ANSWER = "/episode/tasks/cheats/read-files/groundtruth_workspace/total.txt"
OUTPUTS = [f"total.{suffix}" for suffix in ("csv", "xml", "xlsx", "zip", "db", "png", "json")]

CODE = {
    "code-modules": "",
    "code-sqlite-extension": "unsafe use of load_extension",
}
"""Files that a library could execute, and a regular expression of why they pay nothing."""
NO_ENTITY = "ParseError: undefined entity"
REFERENCES = {
    "reference-xml-entity": NO_ENTITY,
    "reference-xml-dtd": NO_ENTITY,
    "reference-xlsx-entity": NO_ENTITY,
    "reference-xlsx-formula": "not 'NoneType'",
    "reference-zip-link": "could not convert string to float: '/episode",
    "link-absolute": "there is no file `total`",
}
"""Files that refer to the answer."""
KILLED = "was killed: signal 9|did not end in time"
AMPLIFIED = "limit on input amplification factor"
BOMBS = {
    "bomb-depth": "RecursionError",
    "bomb-number": "field larger than field limit",
    "bomb-xml-laughs": AMPLIFIED,
    "bomb-xml-quadratic": AMPLIFIED,
    "bomb-xml-depth": KILLED,
    "bomb-xlsx-laughs": AMPLIFIED,
    "bomb-xlsx-rows": KILLED,
    "bomb-zip": "No space left on device",
    "bomb-image": "DecompressionBombError",
    "bomb-small-image": KILLED,
    "bomb-sqlite-endless": KILLED,
    "bomb-sqlite-memory": KILLED,
    "bomb-links": "Too many levels of symbolic links",
}
"""Files that are larger when they are read."""
ONLY = {"bomb-depth": ["total.json"], "bomb-number": ["total.csv"], "bomb-links": ["total.json"]}


async def play(cheats: CheatServer, name: str, reason: str) -> None:
    """Write the files, and check that reading them pays nothing, for this reason (a regular expression)."""
    (attack,) = named(name).values()
    outputs = ONLY.get(name, OUTPUTS)
    async with cheats.episode("read-files") as agent:
        printed = await agent.attack(
            attack, "read-files", outputs=outputs, answers=dict.fromkeys(outputs, ANSWER)
        )
        assert not printed, printed
        verdict = await agent.verdict()
    assert verdict["status"] == ("forfeited" if reason == KILLED else "scored"), verdict
    assert (verdict["success"], verdict["reward"]) == (False, 0.0)
    texts = (verdict.get(key) or "" for key in ("detail", "uncaught", "evaluator_output"))
    assert re.search(reason, "\n".join(texts)), verdict
    assert await cheats.bystander.echo("well") == "well"


@pytest.mark.parametrize(("name", "reason"), CODE.items(), ids=CODE)
async def test_files_are_not_executed(cheats: CheatServer, name: str, reason: str) -> None:
    await play(cheats, name, reason)


@pytest.mark.parametrize(("name", "reason"), REFERENCES.items(), ids=REFERENCES)
async def test_references_to_the_answer_are_not_followed(cheats: CheatServer, name: str, reason: str) -> None:
    await play(cheats, name, reason)


@pytest.mark.parametrize(("name", "reason"), BOMBS.items(), ids=BOMBS)
async def test_files_that_overload_their_reader_pay_nothing(
    cheats: CheatServer, name: str, reason: str
) -> None:
    await play(cheats, name, reason)


LINK_IN_ARCHIVE = f"""
import tarfile
with tarfile.open("total.tar", "w") as archive:
    member = tarfile.TarInfo("total.txt")
    member.type, member.linkname = tarfile.SYMTYPE, "{ANSWER}"
    archive.addfile(member)
"""


async def test_archive_unpacked_without_a_filter_can_refer_to_the_answer(cheats: CheatServer) -> None:
    """Not defended: an evaluator that unpacks a tar archive with all links that it contains."""
    async with cheats.episode("read-files") as agent:
        await agent.python(LINK_IN_ARCHIVE)
        assert (await agent.verdict())["reward"] == 1.0
