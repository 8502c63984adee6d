"""Calls a rubric's function in a grader's sandbox and passes on its return value.

    python FILE '{"root": DIR, "module": NAME, "function": NAME, "offers": {PARAMETER: TEXT | null}}'

Writes the return value as JSON, and nothing else, to the descriptor that DECATHLON_CHANNEL names; the server
validates it. If the function raises, it writes `TYPE: MESSAGE` as a JSON string there. `tool_calls` of the
offers is a file with the agent's calls; its argument is a function that reads them. Processes that the
function starts do not inherit the descriptor, and cannot open it through /proc without CAP_SYS_PTRACE. Exit
code 0: a result was written; 1: the function raised. Standard library only, any Python from 3.8.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

PR_SET_DUMPABLE = 4
MAX_CHARACTERS = 2000
"""Longest description of an exception."""


def main() -> NoReturn:
    order = json.loads(sys.argv[1])
    channel = int(os.environ.pop("DECATHLON_CHANNEL"))
    os.set_inheritable(channel, False)
    protect_descriptors()
    sys.path.insert(0, order["root"])
    sys.argv[1:] = []
    try:
        function = getattr(importlib.import_module(order["module"]), order["function"])
        metrics = call(function, order["offers"])
        data = json.dumps(metrics, default=to_json).encode()
        exit_code = 0
    except BaseException as error:  # noqa: BLE001  (SystemExit, too: only a returned value is a result)
        traceback.print_exc()
        data = json.dumps(describe(error)).encode()
        exit_code = 1
    while data:
        data = data[os.write(channel, data) :]
    finish(exit_code)


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MAX_CHARACTERS]
    except BaseException:  # noqa: BLE001  (the exception's own __str__)
        return type(error).__name__


def protect_descriptors() -> None:
    """Keep other processes of this user from opening its descriptors (prctl(2), PR_SET_DUMPABLE)."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError, TypeError):
        sys.stderr.write("the channel is not protected from other processes: no prctl here\n")


def call(function: Callable[..., Any], offers: dict[str, str | None]) -> Any:
    """Call the function with the values of `offers` for the parameters that it has."""
    positional: list[Any] = []
    keyword: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name not in offers:
            if parameter.default is parameter.empty:
                raise TypeError(f"parameter {name!r} is none of {', '.join(sorted(offers))}")
            continue
        offer = offers[name]
        value = convert(offer, parameter.annotation)
        if name == "tool_calls" and offer is not None:
            value = tool_calls_in(offer)
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            keyword[name] = value
    returned = function(*positional, **keyword)
    if inspect.isawaitable(returned):
        import asyncio

        async def wait() -> Any:
            return await returned

        returned = asyncio.run(wait())
    return returned


def tool_calls_in(file: str) -> Callable[..., list[dict[str, Any]]]:
    """The argument `tool_calls`: the agent's calls, or its calls of one tool, in their order.

    Each has `tool` (`server__tool`), `arguments`, `failed`, and `number`, from 1 over all tools.
    """

    def tool_calls(tool: str | None = None) -> list[dict[str, Any]]:
        with open(file, encoding="utf-8") as lines:  # noqa: PTH123  (pathlib is slow to import)
            calls = [{**json.loads(line), "number": number} for number, line in enumerate(lines, 1)]
        return [call for call in calls if tool in (None, call["tool"])]

    return tool_calls


def convert(text: str | None, annotation: Any) -> Any:
    """A `Path` for a parameter annotated so, else the text: evaluators get paths as arguments."""
    if text is not None and "Path" in type_names(annotation):
        import pathlib

        return pathlib.Path(text)
    return text


def type_names(annotation: Any) -> list[str]:
    """The names of the types in an annotation such as `Path`, `Path | None`, `Optional[Path]` or its text.

    Empty if it also allows a text.
    """
    if not isinstance(annotation, str):
        name = getattr(annotation, "__name__", "")
        # Of a union, its own text: `typing.Optional[pathlib.Path]`, `pathlib.Path | None`.
        annotation = name if isinstance(annotation, type) else str(annotation)
    for sign in "[]|,":
        annotation = annotation.replace(sign, " ")
    names = [name.rpartition(".")[2] for name in annotation.split()]
    return [] if "str" in names else names


def to_json(value: Any) -> Any:
    """The Python value of a numpy scalar; for anything else its repr, which the server's error then shows."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return repr(value)[:200]


def finish(code: int) -> NoReturn:
    """Exit at once: threads and exit handlers that the function left cannot change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
