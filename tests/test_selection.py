"""The lists of `selection` name tests that exist: a renamed test would move without anybody noticing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.selection import KEPT, MOVED

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize("module", [*KEPT, *MOVED])
def test_every_name_in_the_lists_is_a_test(module: str) -> None:
    tree = ast.parse((REPOSITORY / module).read_text("utf-8"))
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    named = {name.partition("[")[0] for name in (*KEPT.get(module, ()), *MOVED.get(module, ()))}
    assert named - tests == set()
