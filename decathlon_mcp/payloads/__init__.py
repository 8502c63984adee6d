"""Programs that run in sandboxes, sent there as source code, and the first process of plain sandboxes.

No package of this project is installed in a sandbox: a payload imports the standard library only, and runs on
the Python versions that its docstring names. Payloads that write to a channel read its descriptor from the
environment variable `decathlon_sandbox.wire.CHANNEL_VARIABLE`, whose name they repeat as a literal.
"""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def source(name: str, package: str = __name__) -> str:
    """The source code of a payload, by its module's name and package."""
    return resources.files(package).joinpath(f"{name}.py").read_text("utf-8")
