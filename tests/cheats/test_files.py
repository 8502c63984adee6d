"""Files that make a program which reads them run code, show other files, hang or exhaust its memory.

The evaluator of the task `read-files` reads them without precautions, in the workspace as current folder.
"""

from __future__ import annotations

import re
from textwrap import dedent

import pytest

from tests.cheats.agent import CheatServer

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

ANSWER = "/episode/tasks/cheats/read-files/groundtruth_workspace/total.txt"
COMMON = f"""
import csv, io, json, os, sqlite3, struct, tarfile, zipfile, zlib
from pathlib import Path

ANSWER = "{ANSWER}"
LAUGHS = "<!ENTITY a0 '70'>" + "".join(
    f"<!ENTITY a{{n}} '{{f'&a{{n - 1}};' * 10}}'>" for n in range(1, 12)
)
EXTERNAL = f"<!ENTITY a SYSTEM 'file://{{ANSWER}}'>"

def xml(declarations, text):
    return f"<?xml version='1.0'?><!DOCTYPE root [{{declarations}}]><root>{{text}}</root>"

def database(*statements):
    with sqlite3.connect("total.db") as connection:
        for statement in statements:
            connection.execute(statement)

def workbook(sheet, declarations="", **parts):
    import openpyxl
    openpyxl.Workbook().save("plain.xlsx")
    with zipfile.ZipFile("plain.xlsx") as plain, zipfile.ZipFile("total.xlsx", "w", 8) as changed:
        for name in plain.namelist():
            if name != "xl/worksheets/sheet1.xml":
                changed.writestr(name, plain.read(name))
        with changed.open("xl/worksheets/sheet1.xml", "w") as file:
            head = f"<?xml version='1.0'?><!DOCTYPE worksheet [{{declarations}}]>" if declarations else ""
            space = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
            file.write(f"{{head}}<worksheet xmlns='{{space}}'><sheetData>".encode())
            for part in sheet:
                file.write(part.encode())
            file.write(b"</sheetData></worksheet>")

def cell(text):
    return [f"<row r='1'><c r='A1' t='inlineStr'><is><t>{{text}}</t></is></c></row>"]

def png(width, height):
    def chunk(kind, content):
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check
    packer, line = zlib.compressobj(), bytes(1 + (width + 7) // 8)
    pixels = b"".join(packer.compress(line) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    Path("total.png").write_bytes(b"\\x89PNG\\r\\n\\x1a\\n" + parts)

"""

CODE = {
    "modules": (
        "",
        """
        for name in "csv sqlite3 zipfile tarfile openpyxl PIL xml tempfile sitecustomize".split():
            os.mkdir(name)
            for file in (f"{name}.py", f"{name}/__init__.py"):
                Path(file).write_text("import os; os._exit(0)")
        Path("total.csv").write_text("0")
        Path("total.xml").write_text("<a>0</a>")""",
    ),
    "sqlite-extension": (
        "unsafe use of load_extension",
        """database("CREATE VIEW totals AS SELECT load_extension('./evil.so') AS total")""",
    ),
}
"""Files that a library could execute. The text is why they pay nothing."""
NO_ENTITY = "ParseError: undefined entity"
LEAKS = {
    "xml-external-entity": (NO_ENTITY, "Path('total.xml').write_text(xml(EXTERNAL, '&a;'))"),
    "xml-external-dtd": (
        NO_ENTITY,
        """Path("total.xml").write_text(f"<!DOCTYPE root SYSTEM 'file://{ANSWER}'><root>&a;</root>")""",
    ),
    "xlsx-external-entity": (NO_ENTITY, "workbook(cell('&a;'), EXTERNAL)"),
    "xlsx-formula": (
        "not 'NoneType'",
        """
        formula = f"'file://{os.path.dirname(ANSWER)}/[total.txt]a'!A1"
        workbook([f"<row r='1'><c r='A1'><f>{formula}</f></c></row>"])""",
    ),
    "zip-link": (
        "could not convert string to float: '/episode",
        """
        with zipfile.ZipFile("total.zip", "w") as archive:
            member = zipfile.ZipInfo("total.txt")
            member.create_system, member.external_attr = 3, 0o120777 << 16
            archive.writestr(member, ANSWER)""",
    ),
    "link": (
        "there is no file `total`",
        """
        os.symlink(ANSWER, "total.csv")
        os.symlink("../tasks/cheats/read-files/groundtruth_workspace/total.txt", "total.xml")""",
    ),
}
"""Files that refer to the answer."""
KILLED = "was killed: signal 9|did not end in time"
AMPLIFIED = "limit on input amplification factor"
BOMBS = {
    "json-depth": ("RecursionError", "Path('total.json').write_text('[' * 100_000)"),
    "json-number": (
        "Exceeds the limit",
        "Path('total.json').write_text('{\"total\": ' + '7' * 1_000_000 + '}')",
    ),
    "csv-field": ("field larger than field limit", "Path('total.csv').write_text('7' * 1_000_000)"),
    "xml-laughs": (AMPLIFIED, "Path('total.xml').write_text(xml(LAUGHS, '&a11;'))"),
    "xml-quadratic": (
        AMPLIFIED,
        """
        entity = "<!ENTITY a '" + "7" * 100_000 + "'>"
        Path('total.xml').write_text(xml(entity, "&a;" * 100_000))""",
    ),
    "xml-depth": (KILLED, "Path('total.xml').write_text('<a>' * 1_000_000)"),
    "xlsx-laughs": (AMPLIFIED, "workbook(cell('&a11;'), LAUGHS)"),
    "xlsx-rows": (KILLED, "workbook(['<row><c/></row>' * 100_000] * 150)"),
    "zip": (
        "No space left on device",
        """
        with (
            zipfile.ZipFile("total.zip", "w", 8, compresslevel=1) as archive,
            archive.open("total.txt", "w") as file,
        ):
            for _ in range(1024):
                file.write(bytes(1 << 20))""",
    ),
    "image": ("DecompressionBombError", "png(30_000, 30_000)"),
    "image-below-the-limit-of-its-library": (KILLED, "png(13_000, 13_000)"),
    "sqlite-endless": (
        KILLED,
        """
        database("CREATE VIEW totals AS WITH RECURSIVE n(x) AS"
                 " (VALUES(1) UNION ALL SELECT x + 1 FROM n) SELECT max(x) AS total FROM n")""",
    ),
    "sqlite-memory": (
        KILLED,
        """database("CREATE VIEW totals AS SELECT hex(zeroblob(400000000)) AS total")""",
    ),
    "links": (
        "Too many levels of symbolic links",
        """
        for number in range(1000):
            os.symlink(f"{number + 1}", str(number))
        os.symlink("0", "1000")
        os.symlink("0", "total.json")""",
    ),
}
"""Files that are larger when they are read."""


async def play(cheats: CheatServer, reason: str, code: str) -> None:
    """Write the files, and check that reading them pays nothing, for this reason (a regular expression)."""
    async with cheats.episode("read-files") as agent:
        printed = await agent.python(COMMON + dedent(code))
        assert not printed, printed
        verdict = await agent.verdict()
    assert verdict["status"] == ("forfeited" if reason == KILLED else "scored"), verdict
    assert (verdict["success"], verdict["reward"]) == (False, 0.0)
    texts = (verdict.get(key) or "" for key in ("detail", "uncaught", "evaluator_output"))
    assert re.search(reason, "\n".join(texts)), verdict
    assert await cheats.bystander.echo("well") == "well"


@pytest.mark.parametrize(("reason", "code"), CODE.values(), ids=CODE)
async def test_files_are_not_executed(cheats: CheatServer, reason: str, code: str) -> None:
    await play(cheats, reason, code)


@pytest.mark.parametrize(("reason", "code"), LEAKS.values(), ids=LEAKS)
async def test_references_to_the_answer_are_not_followed(cheats: CheatServer, reason: str, code: str) -> None:
    await play(cheats, reason, code)


@pytest.mark.parametrize(("reason", "code"), BOMBS.values(), ids=BOMBS)
async def test_files_that_overload_their_reader_pay_nothing(
    cheats: CheatServer, reason: str, code: str
) -> None:
    await play(cheats, reason, code)


LINK_IN_ARCHIVE = """
with tarfile.open("total.tar", "w") as archive:
    member = tarfile.TarInfo("total.txt")
    member.type, member.linkname = tarfile.SYMTYPE, ANSWER
    archive.addfile(member)
"""


async def test_archive_unpacked_without_a_filter_can_refer_to_the_answer(cheats: CheatServer) -> None:
    """Not defended: an evaluator that unpacks a tar archive with all links that it contains."""
    async with cheats.episode("read-files") as agent:
        await agent.python(COMMON + LINK_IN_ARCHIVE)
        assert (await agent.verdict())["reward"] == 1.0
