"""The threat model's tables against the cheats: each is told, and each that is told is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import REPOSITORY, rows

PAGE = REPOSITORY / "docs" / "reward-integrity.md"
TESTS = REPOSITORY / "tests"
CHEATS = TESTS / "cheats"
TABLES = ("What is tried", "What is not defended")
NAMED = re.compile(r"`(?:([\w/]+\.py)::)?(test_\w+)`")


def named_in(file: Path) -> set[str]:
    """The names of a file's tests."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(file.read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_")}


def cheats() -> set[str]:
    return set[str]().union(*(named_in(file) for file in CHEATS.glob("test_*.py")))


def told(heading: str) -> Iterator[tuple[str, str]]:
    """File, empty for those in the cheats' folder, and name of the tests in the last column of a table."""
    for cells in rows(PAGE, heading):
        yield from NAMED.findall(cells[-1])


def test_every_cheat_is_told_once() -> None:
    names = [
        name
        for heading in ("What is tried", "What is not defended")
        for file, name in told(heading)
        if not file
    ]
    assert sorted(names) == sorted(cheats())


def test_every_test_from_elsewhere_is_there() -> None:
    for heading in TABLES:
        for file, name in told(heading):
            assert not file or name in named_in(TESTS / file), name


def test_whatever_is_said_to_be_stopped_is_tested() -> None:
    assert [cells[0] for cells in rows(PAGE, "What is tried") if not NAMED.search(cells[-1])] == []
