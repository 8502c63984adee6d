"""Are the programs of a suite's MCP servers where they would run? What is asked there, and the answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import PurePosixPath

from pydantic import TypeAdapter, ValidationError

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.types import JsonObject


@dataclass(frozen=True, slots=True)
class Absent:
    """`what` is not there. `fetched`: where there is a network, it is fetched when the server starts.

    `cure`: where it was looked for, and what to do.
    """

    what: str
    fetched: bool
    cure: str


_FOUND = TypeAdapter(dict[str, tuple[str, bool]])


def probe_command(
    specs: Iterable[JsonObject], *, root: PurePosixPath, own: Iterable[PurePosixPath]
) -> list[str]:
    """What looks for the programs of these servers (SERVER objects of the wire), in a sandbox with that root.

    `own`: folders, of which a file that a server names must be there.
    """
    servers = [
        {"name": spec["name"], "command": spec["command"], "args": spec["args"]}
        for spec in specs
        if spec["type"] == "stdio"
    ]
    order = {"root": str(root), "own": [f"{root / each}/" for each in own], "servers": servers}
    return ["python3", "-c", _source(), json.dumps(order)]


def read_absent(printed: str, cure: str) -> Mapping[str, Absent]:
    """What was not found, by the server's name. Raises SuiteError where nothing of the kind was printed."""
    try:
        found = _FOUND.validate_json(printed)
    except ValidationError:
        raise SuiteError("the look for the servers' programs gave no answer") from None
    return {name: Absent(what, fetched, cure) for name, (what, fetched) in found.items()}


@cache
def _source() -> str:
    return resources.files("decathlon_mcp.payloads").joinpath("program_probe.py").read_text("utf-8")
