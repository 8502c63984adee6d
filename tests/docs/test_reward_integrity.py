"""docs/reward-integrity.md against tests/cheats: each lists exactly what the other has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs.pages import DOCS, REPOSITORY, tables

PAGE = DOCS / "reward-integrity.md"
TESTS = REPOSITORY / "tests"
DEFENDED = ("attack", "what stops it", "test")
NOT_DEFENDED = ("not defended", "what to do", "shown by")
"""The heads of the tables."""
TEST_NAME = re.compile(r"`(?:([\w/]+\.py)::)?(test_\w+)`")
"""A test of another folder is named with its file."""


def names_of_tests(file: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in ast.parse(file.read_bytes()).body if isinstance(node, functions)}
    return {name for name in names if name.startswith("test_")}


def rows(head: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [row for table in tables(PAGE) if table.head == head for row in table.rows]


def listed() -> list[tuple[str, str]]:
    """File, empty for one of tests/cheats, and name of each test in the last column of the tables."""
    return [test for row in (*rows(DEFENDED), *rows(NOT_DEFENDED)) for test in TEST_NAME.findall(row[-1])]


def test_every_cheat_is_listed() -> None:
    cheats = set[str]().union(*(names_of_tests(file) for file in (TESTS / "cheats").glob("test_*.py")))
    assert {name for file, name in listed() if not file} == cheats


def test_listed_tests_of_other_folders_exist() -> None:
    assert [name for file, name in listed() if file and name not in names_of_tests(TESTS / file)] == []


def test_every_defence_is_tested() -> None:
    assert [row[0] for row in rows(DEFENDED) if not TEST_NAME.search(row[-1])] == []
