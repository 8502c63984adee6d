"""The lists of `selection`, and scripts, name tests that exist: a renamed test would move unnoticed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.selection import KEPT, MOVED

REPOSITORY = Path(__file__).parents[1]


def test_every_name_in_the_lists_is_a_test() -> None:
    for module in {*KEPT, *MOVED}:
        tree = ast.parse((REPOSITORY / module).read_text("utf-8"))
        tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        named = {name.partition("[")[0] for name in (*KEPT.get(module, ()), *MOVED.get(module, ()))}
        assert named - tests == set(), module


def test_scripts_name_tests_that_exist() -> None:
    for script in (REPOSITORY / ".ci").iterdir():
        named = re.findall(r"tests/[\w/]+\.py", script.read_text("utf-8"))
        assert [name for name in named if not (REPOSITORY / name).exists()] == []
