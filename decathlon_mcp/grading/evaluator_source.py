"""The source of an evaluator: its functions, and whether it does anything when it is run.

Files are parsed and never imported: an evaluator belongs into a sandbox.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.validation import did_you_mean

MAX_SOURCE_BYTES = 1 << 20
FUNCTION = "evaluate"
"""The name of a function whose dict gives metrics without a rubric that names it."""
FUNCTION_FILE = "evaluation/evaluator.py"
"""Besides the evaluator's own module, the only file in which that function is looked for."""
MAX_CACHED = 4096
_DEFINITION = re.compile(rb"\bdef\s+evaluate\b")
_PREPARATIONS = frozenset({"path", "load_dotenv", "basicConfig", "filterwarnings", "simplefilter"})
"""Parts of calls that only prepare a module, such as `sys.path.insert`. With these alone it always exits
with 0."""
_EXITS = frozenset({"exit", "_exit", "quit", "abort"})
"""Parts of calls that end the program, wherever they stand."""


@dataclass(frozen=True, slots=True)
class FoundFunction:
    """A function `evaluate` that was found by its name.

    `address`: such as `evaluation/main.py:evaluate`. `metrics`: the names of the metrics that it returns;
    None if its text does not show them.
    """

    address: str
    metrics: frozenset[str] | None


def find_function(folder: Path, module: str, arguments: Collection[str]) -> FoundFunction | str | None:
    """The function `evaluate` of a task, whose folder and evaluator (`evaluation/main.py`) are given.

    It is used if all its required parameters are among `arguments`, if it may return a dict, and if importing
    its module runs nothing. A text says why an existing function is not used; None means that there is none.
    """
    problem = None
    for name in dict.fromkeys((module, FUNCTION_FILE)):
        found = _find_in(*_version(folder / name), name, tuple(arguments))
        if isinstance(found, FoundFunction):
            return found
        problem = problem or found
    return problem


def does_something(file: Path) -> bool:
    """Whether running a module does more than to define names, so that its exit code says something.

    True for a file that cannot be parsed: perhaps the sandbox has a later Python.
    """
    return _does_something(*_version(file))


def parse(file: Path) -> ast.Module:
    """Parse a file. Raises ValueError, with the file and the reason, if that is not possible."""
    try:
        return ast.parse(_read(file), str(file))
    except FileNotFoundError:
        raise ValueError(f"there is no file {file}") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except SyntaxError as error:
        raise ValueError(f"{file} is not Python: line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{file} is not Python: {error}") from None


def _read(file: Path) -> bytes:
    with open_regular(file, follow=True) as opened:
        source = opened.read(MAX_SOURCE_BYTES + 1)
    if len(source) > MAX_SOURCE_BYTES:
        raise ValueError(f"it has more than {MAX_SOURCE_BYTES >> 20} MiB")
    return source


def _version(file: Path) -> tuple[Path, int, int]:
    """The file, and its time and size, for functions that are cached."""
    try:
        status = file.stat()
    except OSError:
        return file, 0, 0
    return file, status.st_ctime_ns, status.st_size


@lru_cache(MAX_CACHED)
def _find_in(
    file: Path, _changed_ns: int, _size_bytes: int, name: str, arguments: tuple[str, ...]
) -> FoundFunction | str | None:
    try:
        # Most evaluators have no such function, and parsing takes 10 ms.
        if _DEFINITION.search(_read(file)) is None:
            return None
        tree = parse(file)
    except (OSError, ValueError):
        return None
    function = _definition(tree, FUNCTION)
    if function is None:
        return None
    problem = _problem(function, arguments)
    if not problem and _runs_code(tree):
        problem = "importing its module would run it"
    if problem:
        return f"{name}, line {function.lineno}: {FUNCTION} gives no metrics: {problem}"
    return FoundFunction(f"{name}:{FUNCTION}", returned_metrics(tree, FUNCTION))


@lru_cache(MAX_CACHED)
def _does_something(file: Path, _changed_ns: int, _size_bytes: int) -> bool:
    try:
        tree = parse(file)
    except ValueError:
        return True
    return _runs_code(tree) or any(map(_is_main_block, tree.body))


def returned_metrics(module: ast.Module, name: str) -> frozenset[str] | None:
    """The names of the metrics that the function can return; None if that depends on more than its text.

    Known are functions whose every `return` has a dict with literal keys. Raises ValueError if the module
    does not bind the name.
    """
    bound = frozenset(_bindings(module))
    if name not in bound:
        if "*" in bound:
            return None
        raise ValueError(f"it has no function {name!r}{did_you_mean(name, bound)}")
    function = _definition(module, name)
    if function is None or function.decorator_list or _is_generator(function):
        return None
    keys = [_literal_keys(node.value) for node in _own_nodes(function) if isinstance(node, ast.Return)]
    known = [names for names in keys if names is not None]
    return frozenset[str]().union(*known) if keys and len(known) == len(keys) else None


def _definition(module: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The module's function of this name; None if there is none, or if the name is bound more than once."""
    definitions = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    functions = [node for node in definitions if node.name == name]
    return functions[0] if len(functions) == 1 and [*_bindings(module)].count(name) == 1 else None


def _problem(function: ast.FunctionDef | ast.AsyncFunctionDef, arguments: Collection[str]) -> str:
    """Why the function cannot be called for metrics; empty if it seems that it can."""
    if function.decorator_list:
        return "it has a decorator, which may change its parameters"
    parameters = function.args
    positional = [*parameters.posonlyargs, *parameters.args]
    required = [
        *positional[: len(positional) - len(parameters.defaults)],
        *(
            parameter
            for parameter, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
            if default is None
        ),
    ]
    for parameter in required:
        if parameter.arg not in arguments:
            return f"its parameter {parameter.arg!r} is none of {', '.join(arguments)}"
    returns = [node.value for node in _own_nodes(function) if isinstance(node, ast.Return)]
    if _is_generator(function) or not any(value is not None for value in returns):
        return "it returns no dict of numbers"
    no_dicts = (ast.Constant, ast.Tuple, ast.List, ast.Compare, ast.JoinedStr)
    if any(value is None or isinstance(value, no_dicts) for value in returns):
        return "it does not always return a dict of numbers"
    return ""


def _is_main_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in _names(node.test)


def _runs_code(module: ast.Module) -> bool:
    """Whether its top level calls or raises, apart from a block for `__main__` and from `_PREPARATIONS`."""
    todo: list[ast.AST] = [node for node in module.body if not _is_main_block(node)]
    while todo:
        node = todo.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.ExceptHandler():
                continue
            case ast.Raise() | ast.Assert():
                return True
            case ast.Expr(value=ast.Call(func=called)) if _PREPARATIONS.isdisjoint(_names(called)):
                return True
            # `passed or sys.exit(1)`
            case ast.Expr(value=ast.BoolOp() | ast.IfExp() | ast.ListComp()):
                return True
            case ast.Call(func=called) if not _EXITS.isdisjoint(_names(called)):
                return True
            case _:
                todo += ast.iter_child_nodes(node)
    return False


def _names(node: ast.AST) -> set[str]:
    """The names and the attributes in an expression or statement."""
    return {
        inner.id if isinstance(inner, ast.Name) else inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name | ast.Attribute)
    }


def _is_generator(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(function))


def _literal_keys(value: ast.expr | None) -> set[str] | None:
    if not isinstance(value, ast.Dict):
        return None
    keys = [key.value if isinstance(key, ast.Constant) else None for key in value.keys]
    names = {key for key in keys if isinstance(key, str)}
    return names if len(names) == len(set(keys)) else None


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without the bodies of functions and classes inside of it."""
    todo = [*ast.iter_child_nodes(function)]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            todo += ast.iter_child_nodes(node)


def _bindings(module: ast.Module) -> Iterator[str]:
    """The names that the module defines, assigns or imports anywhere; `*` may be any name."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
