"""Runs inside a grader's sandbox, sent along as source: calls a rubric's function and writes what it returns.

    python harness.py '{"root": DIR, "module": NAME, "function": NAME, "offers": {PARAMETER: TEXT | null}}'

What the function returns goes over the descriptor that DECATHLON_CHANNEL names, and nothing else does; it is
checked on the other side. Standard library only, any Python from 3.8; nothing of ours is imported. Nothing
that the function starts is handed the descriptor, nor can it be taken from /proc by a process without
CAP_SYS_PTRACE. Exit code 0 is a result, 1 the function's failure.
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


def main() -> NoReturn:
    order = json.loads(sys.argv[1])
    channel = int(os.environ.pop("DECATHLON_CHANNEL"))
    os.set_inheritable(channel, False)
    keep_to_itself()
    sys.path.insert(0, order["root"])
    sys.argv[1:] = []
    try:
        function = getattr(importlib.import_module(order["module"]), order["function"])
        metrics = call(function, order["offers"])
        said = json.dumps(metrics, default=plain).encode()
    except BaseException:  # noqa: BLE001  (SystemExit too: only a value that comes back is a result)
        traceback.print_exc()
        end(1)
    while said:
        said = said[os.write(channel, said) :]
    end(0)


def keep_to_itself() -> None:
    """Other processes of the same user could open this one's descriptors (prctl(2), PR_SET_DUMPABLE)."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError, TypeError):
        sys.stderr.write("the channel is not kept to this process: no prctl here\n")


def call(function: Callable[..., Any], offers: dict[str, str | None]) -> Any:
    """Give the function what its signature asks for, by the names of its parameters."""
    in_order: list[Any] = []
    by_name: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name not in offers:
            if parameter.default is parameter.empty:
                raise TypeError(f"parameter {name!r} is none of {', '.join(sorted(offers))}")
            continue
        value = as_annotated(offers[name], parameter.annotation)
        if parameter.kind is parameter.POSITIONAL_ONLY:
            in_order.append(value)
        else:
            by_name[name] = value
    returned = function(*in_order, **by_name)
    if inspect.isawaitable(returned):
        import asyncio

        async def wait() -> Any:
            return await returned

        returned = asyncio.run(wait())
    return returned


def as_annotated(text: str | None, annotation: Any) -> Any:
    """Evaluators take paths as texts, as their command line gives them; a `Path` where they say so."""
    said = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if text is not None and said.split("|")[0].strip().rpartition(".")[2] == "Path":
        import pathlib

        return pathlib.Path(text)
    return text


def plain(value: Any) -> Any:
    """numpy's scalars as Python's own; anything else is shown to whoever refuses it."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return repr(value)[:200]


def end(code: int) -> NoReturn:
    """At once: threads and exit handlers that the function left have no say any more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
