"""The pages as data: their blocks of code, their headings, their links, in the words of CommonMark."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).parents[2]
PAGES = (
    REPOSITORY / "README.md",
    REPOSITORY / "CHANGELOG.md",
    REPOSITORY / "decathlon_mcp" / "starter" / "suite" / "README.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
)
SERVER = "http://127.0.0.1:8765"
"""Where the pages say that a server is."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page, under the heading it stands below."""

    page: Path
    heading: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


@cache
def tokens(page: Path) -> Sequence[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8"))


def headings(page: Path) -> Iterator[str]:
    """Without their marks, in order."""
    stream = tokens(page)
    for opening, content in pairwise(stream):
        if opening.type == "heading_open":
            yield "".join(child.content for child in content.children or ())


def anchors(page: Path) -> set[str]:
    """What a link may name behind a `#`, as GitHub makes it of a heading."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(page)}


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """The page's fenced blocks, those of any of these languages."""
    names, heading = iter(headings(page)), ""
    for token in tokens(page):
        if token.type == "heading_open":
            heading = next(names)
        elif token.type == "fence" and (not languages or token.info.strip() in languages):
            line = (token.map or [0])[0] + 1
            yield Block(page, heading, line, token.info.strip(), token.content)


def below(page: str, heading: str, language: str) -> list[Block]:
    """The blocks of that language below a heading."""
    return [found for found in blocks(REPOSITORY / page, language) if found.heading == heading]


def block(page: str, heading: str, language: str) -> Block:
    """The one block of that language below a heading."""
    (found,) = below(page, heading, language)
    return found


def inline(page: Path, kind: str) -> Iterator[Token]:
    """The tokens of one kind that stand in the page's text: `code_inline`, `link_open`, `image`."""
    for token in tokens(page):
        for child in token.children or ():
            if child.type == kind:
                yield child


def links(page: Path) -> Iterator[str]:
    """What the page's links and images lead to."""
    yield from (str(token.attrs["href"]) for token in inline(page, "link_open"))
    yield from (str(token.attrs["src"]) for token in inline(page, "image"))


def rows(page: Path, heading: str) -> Iterator[list[str]]:
    """The cells of the tables below a heading, as they are written, without the tables' heads."""
    inside, below, cells = False, "", list[str]()
    names = iter(headings(page))
    for token in tokens(page):
        match token.type:
            case "heading_open":
                below = next(names)
            case "tbody_open" | "tbody_close":
                inside = token.type == "tbody_open" and below == heading
            case "tr_open":
                cells = []
            case "inline" if inside:
                cells.append(token.content)
            case "tr_close" if inside:
                yield cells
            case _:
                pass
