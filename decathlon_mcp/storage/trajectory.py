"""Reads `trajectory.jsonl` of an episode that no server of this process runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from decathlon_mcp.storage.logged_calls import NOT_KEPT, merged, read_calls
from decathlon_mcp.types import JsonObject, as_object

TRAJECTORY_FILE = "trajectory.jsonl"
LAST_LINE_BYTES = 1 << 16
"""More than the line `end` can have."""


class TrajectoryCalls:
    """The calls by their numbers, each with its reply, read from disk one by one each time it is iterated.

    Both the constructor and the iteration block. Lines that cannot be read are skipped; OSError if the file
    cannot be read.
    """

    def __init__(self, trajectory: Path) -> None:
        self._file = trajectory
        with trajectory.open("rb") as lines:
            self._positions = read_calls(lines).positions

    def __iter__(self) -> Iterator[JsonObject]:
        with self._file.open("rb") as lines:

            def line_at(position: int) -> JsonObject | None:
                if position == NOT_KEPT:
                    return None
                lines.seek(position)
                return _parse(lines.readline())

            for at in self._positions:
                if (call := line_at(at.call)) is not None:
                    yield merged(call, line_at(at.reply))


def has_ended(trajectory: Path) -> bool:
    """Whether the last line says that the episode is over. Raises OSError."""
    with trajectory.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - LAST_LINE_BYTES))
        *_, last = file.read().splitlines() or [b""]
    return (_parse(last) or {}).get("event") == "end"


def _parse(line: bytes) -> JsonObject | None:
    try:
        return as_object(json.loads(line))
    except (ValueError, RecursionError):
        return None
