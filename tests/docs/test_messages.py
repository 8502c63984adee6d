"""What can go wrong, as its page tells it: every message is said, and every kind of error is told of."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from decathlon_client import ClientError

from decathlon_mcp.errors import DecathlonError
from tests.docs.pages import REPOSITORY, headings, rows

PAGE = REPOSITORY / "docs" / "troubleshooting.md"
FOREIGN = "Clients"
"""The section of what other programs say."""
OURS = (REPOSITORY / "decathlon_mcp", REPOSITORY / "sandbox", REPOSITORY / "clients")
NEVER_RAISED = {"ClientError"}
"""Bases."""


def test_every_message_is_one_that_is_said() -> None:
    assert [fragment for fragment in told() if not any(fragment in said for said in sayings())] == []


def test_every_kind_of_error_is_told_of() -> None:
    kinds = {
        kind.__name__ for base in (DecathlonError, ClientError) for kind in (base, *base.__subclasses__())
    }
    raised = {name: texts for name, texts in raisings().items() if name in kinds - NEVER_RAISED}
    untold = {
        name
        for name, texts in raised.items()
        if texts and not any(fragment in text for text in texts for fragment in told())
    }
    assert untold == set()


@cache
def told() -> tuple[str, ...]:
    """The pieces of the page's messages that do not differ from time to time."""
    sections = [heading for heading in headings(PAGE) if heading != FOREIGN]
    cells = [cells[0] for section in sections for cells in rows(PAGE, section)]
    return tuple(fragment for cell in cells for fragment in _fragments(cell))


def _fragments(cell: str) -> Iterator[str]:
    for message in re.findall(r"`` (.+?) ``|`([^`]+)`", cell):
        for fragment in re.split(r"…|[:;,()]", "".join(message)):
            if len(words := fragment.strip(" .'?")) >= 6:
                yield words


@cache
def sayings() -> tuple[str, ...]:
    """Every text that our code, or the SDK's server, may say, with its holes."""
    mcp = find_spec("mcp")
    assert mcp is not None
    assert mcp.origin is not None
    found = [(REPOSITORY / "Makefile").read_text("utf-8")]
    for module in _modules(*OURS, Path(mcp.origin).parent / "server"):
        found += [text for node in ast.walk(module) if (text := _text(node)) is not None]
    return tuple(found)


@cache
def raisings() -> dict[str, list[str]]:
    """The texts that errors are made with, by the names of their classes."""
    found: dict[str, list[str]] = {}
    for module in _modules(*OURS):
        for node in ast.walk(module):
            match node:
                case ast.Call(func=ast.Name(id=name), args=[first, *_]) if text := _text(first):
                    found.setdefault(name, []).append(text)
                case _:
                    pass
    return found


def _modules(*folders: Path) -> Iterator[ast.Module]:
    for file in (file for folder in folders for file in sorted(folder.rglob("*.py"))):
        yield ast.parse(file.read_bytes())


def _text(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in values)
        case _:
            return None
