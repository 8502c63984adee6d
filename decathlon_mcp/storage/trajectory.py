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
    """The calls by their numbers, each with its reply, read from disk one by one each time it is iterated.

    Both the constructor and the iteration block. Lines that cannot be read are skipped; OSError if the file
    cannot be read.
    """

    def __init__(self, trajectory: Path) -> None:
        self._file = trajectory
        with open_regular(trajectory) as lines:
            self._positions = read_calls(lines).positions

    def __iter__(self) -> Iterator[JsonObject]:
        return calls_at(self._file, self._positions)


def calls_at(trajectory: Path, positions: Iterable[Positions]) -> Iterator[JsonObject]:
    """Read calls, one after another: the members of both lines as one object, see `merged`.

    Calls that were not kept or cannot be read are skipped.
    """
    with open_regular(trajectory) as lines:
        for at in positions:
            if (call := read_line(lines, at.call)) is not None:
                yield merged(call, read_line(lines, at.reply))


def read_line(lines: BinaryIO, position: int) -> JsonObject | None:
    """Read one line; None if it was not kept or cannot be read."""
    if position == NOT_KEPT:
        return None
    lines.seek(position)
    return read_object(lines.readline())


def has_ended(trajectory: Path) -> bool:
    """Whether the last line says that the episode is over. Raises OSError."""
    with open_regular(trajectory) as file:
        file.seek(max(0, file.seek(0, 2) - LAST_LINE_BYTES))
        *_, last = file.read().splitlines() or [b""]
    return (read_object(last) or {}).get("event") == "end"
