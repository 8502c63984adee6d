"""Reports the uncaught exception that ends an evaluator; imported by Python at start as `sitecustomize`.

The folder of this file, and no other path, is in PYTHONPATH. At exit it writes `TYPE: MESSAGE` as a JSON
string to the descriptor that DECATHLON_CHANNEL names; nothing if the program ends in another way, also by
SystemExit. Neither the descriptor nor the variables reach the processes that the program starts. A
`sitecustomize` of the image runs as if this module did not exist. Standard library only, any Python from 3.8.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

MAX_CHARACTERS = 2000


def main() -> None:
    # `pathlib` is not imported here: every start of an evaluator would pay for it.
    folder = os.path.dirname(__file__)  # noqa: PTH120
    sys.path[:] = [path for path in sys.path if path != folder]
    paths = [path for path in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if path not in ("", folder)]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    with contextlib.suppress(KeyError, ValueError, OSError):
        channel = int(os.environ.pop("DECATHLON_CHANNEL"))
        os.set_inheritable(channel, False)
        atexit.register(report, channel)
    run_replaced()


def report(channel: int) -> None:
    # The interpreter sets it when an exception ends the program, before `sys.excepthook`, which the program
    # may have replaced. SystemExit is no such exception.
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        with contextlib.suppress(OSError):
            os.write(channel, json.dumps(describe(error)).encode())


def describe(error: BaseException) -> str:
    name = type(error).__qualname__
    if type(error).__module__ not in ("builtins", "__main__"):
        name = f"{type(error).__module__}.{name}"
    try:
        message = str(error)
    except BaseException:  # noqa: BLE001  (code of the program)
        message = "(no message: its __str__ failed)"
    return f"{name}: {message}"[:MAX_CHARACTERS] if message else name


def run_replaced() -> None:
    """Run the `sitecustomize` that this module stands before, if there is one."""
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


main()
