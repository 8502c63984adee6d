"""Finds out, in a sandbox, which functions of rubrics cannot be called there.

    python3 -c SOURCE '{"root": DIR, "functions": {TASK: [MODULE, NAME]}, "arguments": [PARAMETER, ...]}'

Imports each module, and prints `{TASK: PROBLEM}` for each function that cannot be imported, or that has a
required parameter which is not among the arguments. Calls no function. Standard library only, any Python from
3.8.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback

MAX_CHARACTERS = 500
"""Longest description of an exception."""


def main() -> None:
    order = json.loads(sys.argv[1])
    # What the modules print must not mix with the result.
    result = os.dup(1)
    os.dup2(2, 1)
    sys.path.insert(0, order["root"])
    sys.argv[1:] = []
    problems = {}
    for task, (module, name) in order["functions"].items():
        problem = problem_of(order["root"], module, name, order["arguments"])
        if problem:
            problems[task] = problem
    with os.fdopen(result, "w") as output:
        json.dump(problems, output)
    # Threads and exit handlers of the modules cannot delay this.
    os._exit(0)


def problem_of(root: str, module: str, name: str, arguments: list[str]) -> str:
    """Why the function cannot be called; empty if it can."""
    try:
        function = getattr(importlib.import_module(module), name)
    except BaseException as error:  # noqa: BLE001  (SystemExit, too)
        return f"it cannot be imported: {describe(error)}{place(error, root)}"
    if not callable(function):
        return f"{name!r} is not a function"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ""  # of a built-in function, which does not say
    for parameter in parameters:
        is_required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if is_required and parameter.name not in arguments:
            return f"its parameter {parameter.name!r} is none of {', '.join(sorted(arguments))}"
    return ""


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MAX_CHARACTERS]
    except BaseException:  # noqa: BLE001  (the exception's own __str__)
        return type(error).__name__


def place(error: BaseException, root: str) -> str:
    """File and line of the suite at which the error was raised; empty if it was not raised there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.abspath(frame.filename).startswith(os.path.join(root, ""))]  # noqa: PTH100, PTH118
    if not own:
        return ""
    return f" ({os.path.relpath(own[-1].filename, root)}, line {own[-1].lineno})"


if __name__ == "__main__":
    main()
