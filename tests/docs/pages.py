"""The documentation pages as data: headings, links, code blocks and tables, parsed as CommonMark."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = (
    REPOSITORY / "README.md",
    REPOSITORY / "AGENTS.md",
    REPOSITORY / "CHANGELOG.md",
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "SECURITY.md",
    REPOSITORY / "CODE_OF_CONDUCT.md",
    REPOSITORY / "decathlon_mcp" / "starter" / "suite" / "README.md",
    REPOSITORY / "decathlon_mcp" / "starter" / "template" / "README.md",
    *sorted(DOCS.rglob("*.md")),
)
SERVER = "http://127.0.0.1:8765"
"""The server's address on the pages."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block and the heading above it."""

    page: Path
    heading: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Table:
    """A table and the heading above it; cells are Markdown."""

    heading: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@cache
def tokens(page: Path) -> Sequence[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8"))


def below_headings(page: Path) -> Iterator[tuple[str, Token, Token]]:
    """Each token with the heading above it and the token before it."""
    heading = ""
    for previous, token in pairwise([*tokens(page)[:1], *tokens(page)]):
        if previous.type == "heading_open":
            heading = "".join(child.content for child in token.children or ())
        yield heading, previous, token


def headings(page: Path) -> Iterator[str]:
    """Without their marks, in order."""
    return (heading for heading, previous, _ in below_headings(page) if previous.type == "heading_open")


def anchor(heading: str) -> str:
    """What a link to a heading has after `#`, by GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a link to the page may have after `#`."""
    return frozenset(map(anchor, headings(page)))


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """The page's code blocks in any of these languages; without languages, all of them."""
    for heading, _, token in below_headings(page):
        if token.type == "fence" and (not languages or token.info.strip() in languages):
            line = (token.map or [0])[0] + 1
            yield Block(page, heading, line, token.info.strip(), token.content)


def below(page: str, heading: str, language: str) -> list[Block]:
    """The code blocks of a language below a heading."""
    return [block for block in blocks(REPOSITORY / page, language) if block.heading == heading]


def block(page: str, heading: str, language: str) -> Block:
    """The only code block of a language below a heading."""
    found = below(page, heading, language)
    assert len(found) == 1, f"{page}: {len(found)} blocks of {language!r} below the heading {heading!r}"
    return found[0]


def exports(page: str, heading: str) -> dict[str, str]:
    """The variables that the page sets with `export` in the shell blocks below a heading."""
    lines = [line for found in below(page, heading, "sh") for line in found.text.splitlines()]
    words = [
        word for line in lines if line.startswith("export ") for word in shlex.split(line, comments=True)[1:]
    ]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def inline(page: Path, kind: str) -> Iterator[Token]:
    """The inline tokens of one kind: `code_inline`, `link_open`, `image`."""
    for token in tokens(page):
        for child in token.children or ():
            if child.type == kind:
                yield child


def inline_code(page: Path) -> list[str]:
    """The text of the page's code spans."""
    return [token.content for token in inline(page, "code_inline")]


def links(page: Path) -> Iterator[str]:
    """The targets of the page's links and images."""
    yield from (str(token.attrs["href"]) for token in inline(page, "link_open"))
    yield from (str(token.attrs["src"]) for token in inline(page, "image"))


def tables(page: Path) -> list[Table]:
    """The page's tables, in order."""
    found: list[Table] = []
    lines: list[list[str]] = []
    for heading, previous, token in below_headings(page):
        if token.type == "table_open":
            lines = []
        elif token.type == "tr_open":
            lines.append([])
        elif token.type == "inline" and previous.type in ("th_open", "td_open"):
            lines[-1].append(token.content)
        elif token.type == "table_close":
            head, *rows = (tuple(line) for line in lines)
            found.append(Table(heading, head, tuple(rows)))
    return found


def rows(page: Path, heading: str) -> list[tuple[str, ...]]:
    """The rows of the tables below a heading, without the tables' heads."""
    return [row for table in tables(page) if table.heading == heading for row in table.rows]
