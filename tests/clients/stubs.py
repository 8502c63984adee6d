"""Generates `sync.pyi`, the types of the synchronous classes, from the source of the asynchronous ones.

python -m tests.clients.stubs
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TypeGuard

CLIENT = Path(__file__).parents[2] / "clients" / "decathlon_client"
STUB = CLIENT / "sync.pyi"
PROXIES = {
    "client_episode": ["Episode"],
    "lockstep": ["Slot", "Lockstep"],
    "batch": ["Batch"],
    "decathlon": ["Decathlon"],
}
HIDDEN = {("Slot", "keep_open"), ("Slot", "act"), ("Slot", "evaluate"), ("Batch", "keep_shown")}
CONSTRUCTED = {"Decathlon"}
HEAD = '''"""Generated from the asynchronous classes by `python -m tests.clients.stubs`. Do not edit."""

{imports}

T = TypeVar("T")
OnProgress: TypeAlias = Callable[[float, float | None, str | None], None]
Player: TypeAlias = Callable[[Episode], T]

{classes}
'''
MORE_IMPORTS = {
    "AbstractContextManager": "contextlib",
    "Call": "decathlon_client.lockstep",
    "Callable": "collections.abc",
    "Generator": "collections.abc",
    "TypeAlias": "typing",
    "TypeVar": "typing",
}
"""Names that the modules of the asynchronous classes do not import."""
DEFINED_IN_STUB = {"OnProgress", "Player"}


def stub() -> str:
    """The text of `sync.pyi`, formatted by ruff."""
    modules = [ast.parse((CLIENT / f"{module}.py").read_text("utf-8")) for module in PROXIES]
    proxies = {name for names in PROXIES.values() for name in names}
    classes = [
        _class(node)
        for module in modules
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name in proxies
    ]
    head = HEAD.format(imports="", classes="")
    used = {
        node.id
        for tree in [ast.parse(head), *classes]
        for node in ast.walk(tree)
        if isinstance(node, ast.Name)
    }
    imports = "\n".join(
        f"from {module} import {name}"
        for name, module in sorted({**_imports(modules), **MORE_IMPORTS}.items())
        if name in used - proxies - DEFINED_IN_STUB
    )
    text = HEAD.format(imports=imports, classes="\n\n".join(ast.unparse(node) for node in classes))
    for command in (["check", "--select", "I", "--fix", "--exit-zero", "--quiet"], ["format", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def _imports(modules: list[ast.Module]) -> dict[str, str]:
    """The source module of each imported name."""
    return {
        alias.name: node.module
        for module in modules
        for node in module.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _class(node: ast.ClassDef) -> ast.ClassDef:
    overloads = {member.name for member in node.body if _is_overload(member)}
    node.body = [
        stubbed
        for member in node.body
        if getattr(member, "name", None) not in overloads or _is_overload(member)
        if (stubbed := _member(node.name, member)) is not None
    ]
    return node


def _is_overload(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(decorator) == "overload" for decorator in node.decorator_list
    )


def _member(owner: str, node: ast.stmt) -> ast.stmt | None:
    if isinstance(node, ast.AnnAssign) or _is_docstring(node):
        return node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (owner, node.name) in HIDDEN:
        return None
    name = node.name.replace("__a", "__") if node.name in ("__aenter__", "__aexit__") else node.name
    is_dunder = name.startswith("__")
    if (name.startswith("_") and not is_dunder) or (name == "__init__" and owner not in CONSTRUCTED):
        return None
    decorators = [node for node in node.decorator_list if ast.unparse(node) != "asynccontextmanager"]
    synchronous = _Synchronous(is_context_manager=len(decorators) < len(node.decorator_list))
    stubbed = ast.FunctionDef(
        name=name,
        args=synchronous.visit(node.args),
        body=[first for first in node.body[:1] if _is_docstring(first)] or [ast.Expr(ast.Constant(...))],
        decorator_list=decorators,
        returns=synchronous.visit(node.returns) if node.returns else None,
    )
    return ast.copy_location(stubbed, node)


class _Synchronous(ast.NodeTransformer):
    """Replaces asynchronous types in annotations with their synchronous counterparts."""

    def __init__(self, *, is_context_manager: bool) -> None:
        self._generator = "AbstractContextManager" if is_context_manager else "Generator"

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id == "AsyncGenerator":
            node.id = self._generator
        elif node.id == "AbstractAsyncContextManager":
            node.id = "AbstractContextManager"
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Keep only `Iterable[X]` of `Iterable[X] | AsyncIterable[X]`."""
        if ast.unparse(node.right).startswith("AsyncIterable"):
            return node.left
        return node


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


if __name__ == "__main__":
    STUB.write_text(stub(), "utf-8")
