"""Reads the lines of a `trajectory.jsonl`, also of an episode that no server of this process runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.storage.logged_calls import NOT_KEPT, Positions, merged, read_calls
from decathlon_mcp.types import JsonObject, read_object

TRAJECTORY_FILE = "trajectory.jsonl"
LAST_LINE_BYTES = 1 << 16
"""More than the line `end` can have."""


class TrajectoryCalls:
    """The calls by their numbers, read from disk one by one each time it is iterated.

    Each is the members of both lines as one object, see `merged`; one without a reply lacks the reply's
    members. Calls that were not kept or cannot be read are skipped. `positions`: of which calls; None: of all
    that the file has now. Both the constructor and the iteration block; OSError if the file cannot be read.
    """

    def __init__(self, trajectory: Path, positions: Iterable[Positions] | None = None) -> None:
        self._file = trajectory
        if positions is None:
            with open_regular(trajectory) as lines:
                positions = read_calls(lines).positions
        self._positions = positions

    def __iter__(self) -> Iterator[JsonObject]:
        with open_regular(self._file) as lines:
            for at in self._positions:
                if (call := read_line(lines, at.call)) is not None:
                    yield merged(call, read_line(lines, at.reply))


def raw_line(lines: BinaryIO, position: int) -> bytes:
    """One line as it is; empty if it was not kept."""
    if position == NOT_KEPT:
        return b""
    lines.seek(position)
    return lines.readline()


def read_line(lines: BinaryIO, position: int) -> JsonObject | None:
    """Read one line; None if it was not kept or cannot be read."""
    return read_object(raw_line(lines, position))


def has_ended(trajectory: Path) -> bool:
    """Whether the last line says that the episode is over. Raises OSError."""
    with open_regular(trajectory) as file:
        file.seek(max(0, file.seek(0, 2) - LAST_LINE_BYTES))
        *_, last = file.read().splitlines() or [b""]
    return (read_object(last) or {}).get("event") == "end"
