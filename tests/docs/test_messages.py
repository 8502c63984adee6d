"""Every message quoted in docs/troubleshooting.md is one that the code can produce."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tests.docs.pages import DOCS, REPOSITORY, headings, rows

PAGE = DOCS / "troubleshooting.md"
OTHER_PROGRAMS = "Clients"
"""The section with messages of other programs."""
SOURCES = (REPOSITORY / "decathlon_mcp", REPOSITORY / "sandbox", REPOSITORY / "clients")
SHORTEST = 6
"""Shorter fragments would be found in some text of the code by chance."""


def test_quoted_messages_are_in_the_code() -> None:
    texts = list(_texts_of_the_code())
    quotes = [quote for section in headings(PAGE) if section != OTHER_PROGRAMS for quote in _quotes(section)]
    assert quotes
    missing = {
        quote: fragment
        for quote in quotes
        for fragment in _fragments(quote)
        if not any(fragment in text for text in texts)
    }
    assert missing == {}


def _quotes(section: str) -> Iterator[str]:
    """The code spans in the first column."""
    for cells in rows(PAGE, section):
        yield from ("".join(quote) for quote in re.findall(r"`` (.+?) ``|`([^`]+)`", cells[0]))


def _fragments(quote: str) -> Iterator[str]:
    """The parts between `…` and punctuation: the code may build one message from several texts."""
    for fragment in re.split(r"…|[:;,()]", quote):
        if len(words := fragment.strip(" .'?")) >= SHORTEST:
            yield words


def _texts_of_the_code() -> Iterator[str]:
    """The string literals of this project and of the SDK's server; `…` stands for an f-string's values."""
    yield (REPOSITORY / "Makefile").read_text("utf-8")
    sdk = find_spec("mcp")
    assert sdk is not None
    assert sdk.origin is not None
    for folder in (*SOURCES, Path(sdk.origin).parent / "server"):
        for file in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_bytes())):
                match node:
                    case ast.Constant(value=str(text)):
                        yield text
                    case ast.JoinedStr(values=parts):
                        yield "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in parts)
                    case _:
                        pass
