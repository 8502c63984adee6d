"""The site's navigation against the pages; `make docs` has Sphinx check the rest."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from docs.conf import ELSEWHERE, FIRST, NAVIGATION, navigation
from tests.docs.pages import REPOSITORY

DOCS = REPOSITORY / "docs"
ENTRIES = [entry for entries in NAVIGATION.values() for entry in entries]


def _file(entry: str) -> Path:
    return (REPOSITORY if entry.startswith("/") else DOCS) / f"{entry.strip('/')}.md"


def _pages() -> dict[Path, int]:
    """How often each is in the navigation; a star adds what nothing else names."""
    named = Counter(_file(entry) for entry in ENTRIES if "*" not in entry)
    for entry in ENTRIES:
        if "*" in entry:
            named.update(page for page in DOCS.glob(f"{entry}.md") if page not in named)
    return named


def test_every_page_is_in_the_navigation_once() -> None:
    pages = {*DOCS.rglob("*.md"), *(REPOSITORY / page for page in ELSEWHERE)}
    assert _pages() == dict.fromkeys(pages, 1)


def test_every_folder_of_the_navigation_has_pages() -> None:
    assert [entry for entry in ENTRIES if "*" in entry and not list(DOCS.glob(f"{entry}.md"))] == []


def test_the_first_page_comes_first() -> None:
    assert _file(ENTRIES[0]) == REPOSITORY / f"{FIRST}.md"
    assert navigation().index("self") < navigation().index(ENTRIES[1])


def test_nothing_of_the_site_is_fetched_from_elsewhere() -> None:
    for file in (DOCS / "site").iterdir():
        assert re.findall(r"https?://|@import", file.read_text("utf-8")) == []
