"""The driver's source as the first thing on its own line: nothing is copied into a sandbox or mounted."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

from decathlon_sandbox import wire

BOOT_COMMAND = wire.BOOT_COMMAND


@cache
def boot_message() -> bytes:
    """A line with a number of bytes, then those bytes: JSON of module name to source."""
    package = resources.files("decathlon_sandbox")
    sources = {
        "decathlon_sandbox" if (stem := file.name[:-3]) == "__init__" else f"decathlon_sandbox.{stem}": (
            file.read_text("utf-8")
        )
        for file in package.iterdir()
        if file.name.endswith(".py")
    }
    body = json.dumps(sources).encode()
    return b"%d\n%s" % (len(body), body)
