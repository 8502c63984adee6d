"""Classes as pages tell them: what their source says, in Markdown, with nothing imported.

Read from the source and not from the living objects, so that a page is the same whichever Python wrote it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

Method: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

LINE_CHARACTERS = 90
LEFT_OUT = frozenset({"read", "mistake", "keep_open"})
"""Methods that are public for this package's own use."""


@dataclass(frozen=True, slots=True)
class Definition:
    """One name at the top of a module: its statement, and what is said of it."""

    name: str
    node: ast.ClassDef | ast.AnnAssign
    told: str


@cache
def definitions(file: Path) -> dict[str, Definition]:
    """The classes and aliases of a module, in its order."""
    found: dict[str, Definition] = {}
    body = ast.parse(file.read_bytes()).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.ClassDef(name=name):
                found[name] = Definition(name, node, ast.get_docstring(node) or "")
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = Definition(name, node, _text_of(following))
            case _:
                pass
    return found


def exported(package: Path) -> frozenset[str]:
    """The names in its `__all__`."""
    for node in ast.parse((package / "__init__.py").read_bytes()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    raise LookupError(f"{package} exports nothing")


def section(definition: Definition) -> Iterator[str]:
    """A part of a page: what it is, how it is made, what it holds, what it does."""
    yield f"## {definition.name}"
    yield ""
    yield from paragraphs(definition.told)
    if isinstance(definition.node, ast.AnnAssign):
        yield from _code(_written(definition.node))
        return
    if made := _made(definition, definition.node):
        yield from _code(made)
    if managed := "\n".join(_held(definition.node)):
        yield from _code(managed)
    properties = [method for method in methods(definition.node) if _is(method, "property")]
    for method in properties:
        yield _property(method)
    if properties:
        yield ""
    for method in methods(definition.node):
        if method not in properties:
            yield f"### {definition.name}.{method.name}"
            yield ""
            yield from _code(signature(method))
            yield from paragraphs(ast.get_docstring(method) or "")


def methods(node: ast.ClassDef) -> Iterator[Method]:
    """The public ones, properties among them."""
    for statement in node.body:
        if isinstance(statement, Method) and statement.name[0] != "_" and statement.name not in LEFT_OUT:
            yield statement


def signature(method: Method) -> str:
    """As whoever calls it sees it: without `self`, and what a decorator makes of it in its type."""
    gives = _written(method.returns) if method.returns else "None"
    is_async = isinstance(method, ast.AsyncFunctionDef)
    if is_async and gives.startswith("AsyncGenerator["):
        wrapper = "AbstractAsyncContextManager[" if _is(method, "asynccontextmanager") else "AsyncIterator["
        is_async, gives = False, gives.replace("AsyncGenerator[", wrapper, 1)
    return _folded(f"{'async ' if is_async else ''}def {method.name}(", _given(method), f") -> {gives}: ...")


def paragraphs(text: str) -> Iterator[str]:
    """Each on one line."""
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.strip():
            yield " ".join(paragraph.split())
            yield ""


def _given(method: Method) -> list[str]:
    """What it takes, an argument each; the star and the slash stand as arguments, too."""
    taken = method.args
    without_self = ast.arguments(
        posonlyargs=taken.posonlyargs,
        args=taken.args[1:],
        vararg=taken.vararg,
        kwonlyargs=taken.kwonlyargs,
        kw_defaults=taken.kw_defaults,
        kwarg=taken.kwarg,
        defaults=taken.defaults,
    )
    parts, depth = [""], 0
    for character in _written(without_self):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [_spaced(part.strip()) for part in parts if part.strip()]


def _spaced(argument: str) -> str:
    return argument.replace("=", " = ", 1) if ": " in argument else argument


def _folded(head: str, arguments: list[str], tail: str) -> str:
    """On one line where it fits, or else an argument a line."""
    line = f"{head}{', '.join(arguments)}{tail}"
    if len(line) <= LINE_CHARACTERS:
        return line
    return "\n".join([head, *(f"    {argument}," for argument in arguments), tail])


def _made(definition: Definition, node: ast.ClassDef) -> str | None:
    """How to make one, unless something else of ours does that."""
    for method in node.body:
        if (
            isinstance(method, ast.FunctionDef)
            and method.name == "__init__"
            and "ade by " not in definition.told
        ):
            taken = ", ".join(["self", *_given(method)])
            return f"class {definition.name}:\n    def __init__({taken}) -> None: ..."
    return None


def _held(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            plain = isinstance(statement.value, ast.Constant | ast.Dict | ast.Tuple)
            told = f"{statement.target.id}: {_written(statement.annotation)}"
            if not told.startswith("_"):
                yield f"{told} = {_written(statement.value)}" if plain and statement.value else told


def _property(method: Method) -> str:
    words = " ".join((ast.get_docstring(method) or "").split())
    gives = _written(method.returns) if method.returns else "None"
    return f"- `{method.name}: {gives}`{f': {words}' if words else ''}"


def _is(method: Method, decorator: str) -> bool:
    return any(ast.unparse(each) == decorator for each in method.decorator_list)


def _written(node: ast.AST) -> str:
    """As a formatter would have it: with double quotes."""
    return ast.unparse(node).replace("'", '"')


def _text_of(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return inspect.cleandoc(text)
        case _:
            return ""


def _code(text: str) -> Iterator[str]:
    yield "```python"
    yield text
    yield "```"
    yield ""
