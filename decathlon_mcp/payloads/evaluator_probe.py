"""Finds out, in a sandbox with a suite's own files, which evaluators Python cannot run there.

    python3 -c SOURCE '{"root": DIR, "modules": {TASK: MODULE}}'

Prints `{TASK: PROBLEM}` for each module that Python does not find or cannot compile, and for each that begins
with the import of a module that is not there; so for the modules of the suite that these import. It runs none
of them, only the packages above them. Standard library only, any Python from 3.8.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys

MAX_CHARACTERS = 500
MAX_BYTES = 1 << 20


def main() -> None:
    order = json.loads(sys.argv[1])
    # What the packages print must not mix with the result.
    result = os.dup(1)
    os.dup2(2, 1)
    sys.path.insert(0, order["root"])
    sys.argv[1:] = []
    found = {task: problem_of(order["root"], module, set()) for task, module in order["modules"].items()}
    with os.fdopen(result, "w") as output:
        json.dump({task: problem for task, problem in found.items() if problem}, output)
    os._exit(0)


def problem_of(root: str, module: str, seen: set[str]) -> str:
    """Why Python cannot run the module; empty if it seems to be able to."""
    if module in seen:
        return ""
    seen.add(module)
    try:
        spec = importlib.util.find_spec(module)
    except ImportError as error:
        return f"Python finds no module {module}: {error}"[:MAX_CHARACTERS]
    except BaseException as error:  # noqa: BLE001  (of the packages above it, SystemExit too)
        return f"a package above {module} cannot be imported: {type(error).__name__}"
    if spec is None:
        return f"Python finds no module {module}"
    file = spec.origin or ""
    if not file.endswith(".py") or not file.startswith(os.path.join(root, "")):  # noqa: PTH118
        return ""
    name = os.path.relpath(file, root)
    try:
        with open(file, "rb") as opened:  # noqa: PTH123  (pathlib is slow to import)
            code = opened.read(MAX_BYTES)
        if len(code) == MAX_BYTES:
            return ""
        compile(code, file, "exec", dont_inherit=True)
        tree = ast.parse(code)
    except SyntaxError as error:
        return f"{name}, line {error.lineno}: {error.msg}"[:MAX_CHARACTERS]
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return f"{name} cannot be compiled: {error}"[:MAX_CHARACTERS]
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    own_code_ran = False
    for line, imported in first_imports(tree, package):
        if is_own(root, imported):
            if problem := problem_of(root, imported, seen):
                return problem if ".py, line " in problem else f"{name}, line {line}: {problem}"
            # It may have changed where modules are found.
            own_code_ran = True
        elif not own_code_ran and is_missing(imported):
            return f"{name}, line {line}: there is no module {imported.partition('.')[0]}"
    return ""


def first_imports(tree: ast.Module, package: str) -> list[tuple[int, str]]:
    """The modules that the first statements import, with their lines.

    Up to the first statement that could change where modules are found: what follows may come from anywhere,
    also from the workspace.
    """
    found: list[tuple[int, str]] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            try:
                relative = "." * node.level + (node.module or "")
                found.append((node.lineno, importlib.util.resolve_name(relative, package)))
            except (ImportError, ValueError):
                return found
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.decorator_list or node.args.defaults or any(node.args.kw_defaults):
                return found
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return found
    return found


def is_own(root: str, module: str) -> bool:
    """Whether the outermost package of the module is the suite's."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except BaseException:  # noqa: BLE001  (of an import hook)
        return False
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(place.startswith(os.path.join(root, "")) for place in places)  # noqa: PTH118


def is_missing(module: str) -> bool:
    """Whether Python finds no outermost package of the module."""
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is None
    except BaseException:  # noqa: BLE001  (of an import hook)
        return False


if __name__ == "__main__":
    main()
