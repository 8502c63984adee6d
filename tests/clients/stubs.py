"""Writes the types of the synchronous twin, from the source of the asynchronous classes.

python -m tests.clients.stubs
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[2] / "clients" / "decathlon_client"
STUB = CLIENT / "sync.pyi"
TWINS = {
    "episode": ["Episode"],
    "lockstep": ["Slot", "Lockstep"],
    "batch": ["Batch"],
    "decathlon": ["Decathlon"],
}
HIDDEN = {("Slot", "hold"), ("Slot", "act"), ("Slot", "evaluate")}
CONSTRUCTED = {"Decathlon"}
HEAD = '''"""Made from the asynchronous classes by `python -m tests.clients.stubs`; not to be edited."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, Unpack

from decathlon_client.batch import Result
from decathlon_client.errors import ClientError
from decathlon_client.filters import Filters
from decathlon_client.lockstep import Call
from decathlon_client.openings import OpeningOptions
from decathlon_client.tally import Tally
from decathlon_client.values import JsonObject, Policy, Reply, Task, Tool, Verdict

T = TypeVar("T")
OnProgress: TypeAlias = Callable[[float, float | None, str | None], None]
Player: TypeAlias = Callable[[Episode], T]
'''


def stub() -> str:
    """The text of `sync.pyi`, as ruff formats it."""
    classes = [
        _class(node)
        for module, names in TWINS.items()
        for node in ast.parse((CLIENT / f"{module}.py").read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in names
    ]
    text = "\n\n".join([HEAD, *(ast.unparse(node) for node in classes)])
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(STUB), "-"]
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout


def _class(node: ast.ClassDef) -> ast.ClassDef:
    node.body = [made for member in node.body if (made := _member(node.name, member)) is not None]
    return node


def _member(owner: str, node: ast.stmt) -> ast.stmt | None:
    if isinstance(node, ast.AnnAssign) or _is_docstring(node):
        return node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (owner, node.name) in HIDDEN:
        return None
    name = node.name.replace("__a", "__") if node.name in ("__aenter__", "__aexit__") else node.name
    is_dunder = name.startswith("__")
    if (name.startswith("_") and not is_dunder) or (name == "__init__" and owner not in CONSTRUCTED):
        return None
    decorators = [each for each in node.decorator_list if ast.unparse(each) != "asynccontextmanager"]
    synchronous = _Synchronous(entered=len(decorators) < len(node.decorator_list))
    made = ast.FunctionDef(
        name=name,
        args=synchronous.visit(node.args),
        body=[each for each in node.body[:1] if _is_docstring(each)] or [ast.Expr(ast.Constant(...))],
        decorator_list=decorators,
        returns=synchronous.visit(node.returns) if node.returns else None,
    )
    return ast.copy_location(made, node)


class _Synchronous(ast.NodeTransformer):
    def __init__(self, *, entered: bool) -> None:
        self._generator = "AbstractContextManager" if entered else "Generator"

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id == "AsyncGenerator":
            node.id = self._generator
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """`Iterable[X] | AsyncIterable[X]` is the first of the two."""
        if ast.unparse(node.right).startswith("AsyncIterable"):
            return node.left
        return node


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


if __name__ == "__main__":
    STUB.write_text(stub(), "utf-8")
