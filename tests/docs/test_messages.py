"""Every message quoted in docs/troubleshooting.md is one that the code can produce."""

from __future__ import annotations

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


LINES_OF_A_STRING = re.compile(r"""["']\n *f?["']""")


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
    """The sources of this project and of the SDK's server, in which a string of several lines is one."""
    yield (REPOSITORY / "Makefile").read_text("utf-8")
    sdk = find_spec("mcp")
    assert sdk is not None
    assert sdk.origin is not None
    for folder in (*SOURCES, Path(sdk.origin).parent / "server"):
        for file in folder.rglob("*.py"):
            yield LINES_OF_A_STRING.sub("", file.read_text("utf-8"))
