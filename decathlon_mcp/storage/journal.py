"""The files of one episode: `trajectory.jsonl`, one event a line, and `verdict.json`."""

from __future__ import annotations

import json
import logging
import os
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.storage.disk import SMALL_BYTES, DiskSpace
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, as_json, as_object

MAX_CALLS_BYTES = 256 << 20
"""Default limit on the calls in one trajectory."""
VERDICT_BYTES = 256 << 10
"""Room on the disk that is reserved for the verdict: several times the longest that there can be."""
NOT_KEPT = -1
"""Position of a call that the trajectory does not have."""

log = logging.getLogger("decathlon.observe")


class Journal:
    """Writes and reads the folder of one episode, which is readable by its owner alone.

    The calls take at most `max_calls_bytes`, and SMALL_BYTES while `disk` is nearly full. Room for the
    verdict is reserved from the start. Creating a journal raises OSError, for a full disk too; later a disk
    that fails costs lines and files, which is logged, and never the episode.
    """

    def __init__(
        self, folder: Path, *, max_calls_bytes: int = MAX_CALLS_BYTES, disk: DiskSpace | None = None
    ) -> None:
        self.folder = folder
        self._max_calls_bytes = max_calls_bytes
        self.disk = disk
        self._size_bytes = 0
        # Created at once, so that a full disk is found before the episode starts.
        folder.mkdir(parents=True, mode=0o700)
        self._reserved = folder / ".verdict.reserved"
        try:
            _reserve(self._reserved)
            self._trajectory = (folder / "trajectory.jsonl").open("ab", buffering=0)
        except OSError:
            self._reserved.unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()
            raise

    def add(self, event: str, **values: Any) -> None:
        """Append one line: `event`, `time` (Unix seconds) and the values. Does nothing once closed."""
        self._append(event, values, limit_bytes=None)

    def add_call(self, **values: Any) -> int:
        """Append one call and return its position, for `calls_at`.

        Returns NOT_KEPT if a limit is reached, the disk refuses the line, or the journal is closed.
        """
        limit_bytes = self._max_calls_bytes
        if self.disk is not None and self.disk.is_low():
            limit_bytes = min(limit_bytes, SMALL_BYTES)
        return self._append("call", values, limit_bytes=limit_bytes)

    def calls_at(self, positions: Iterable[int]) -> Iterator[JsonObject]:
        """Read calls at these positions, one after another; NOT_KEPT and unreadable lines are skipped."""
        with (self.folder / "trajectory.jsonl").open("rb") as lines:
            for position in positions:
                if position != NOT_KEPT:
                    lines.seek(position)
                    if (value := _read_line(lines.readline())) is not None:
                        yield value

    def events(self, event: str) -> Iterator[JsonObject]:
        """Read the lines of one kind, in order. Lines that cannot be read are skipped."""
        with (self.folder / "trajectory.jsonl").open("rb") as lines:
            for line in lines:
                if (value := _read_line(line)) is not None and value.get("event") == event:
                    yield value

    def write_verdict(self, verdict: JsonObject) -> None:
        """Write or replace `verdict.json`; the first time into the room that is reserved for it."""
        data = _indented(verdict)
        try:
            if len(data) <= VERDICT_BYTES and self._reserved.exists():
                # Overwrites blocks that the file has already, so that a full disk cannot refuse them.
                with self._reserved.open("r+b", buffering=0) as file:
                    _write_all(file.fileno(), data)
                    file.truncate(len(data))
                os.replace(self._reserved, self.folder / "verdict.json")  # noqa: PTH105  (documented as atomic)
            else:
                self._reserved.unlink(missing_ok=True)
                self._replace("verdict.json", (data,))
        except OSError as error:
            _warn_of_file("verdict.json", error)

    def write(self, name: str, value: JsonObject) -> None:
        """Write or replace a file of the folder; readers see either the whole file or none."""
        self.write_chunks(name, (_indented(value),))

    def write_chunks(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write or replace a file of the folder, as `write` does, from chunks."""
        try:
            self._replace(name, chunks if self.disk is None else self.disk.guard(chunks))
        except (OSError, AtCapacityError) as error:
            _warn_of_file(name, error)

    def close(self) -> None:
        """Close the trajectory; it can still be read."""
        self._trajectory.close()
        self._reserved.unlink(missing_ok=True)

    def _append(self, event: str, values: JsonObject, *, limit_bytes: int | None) -> int:
        if self._trajectory.closed:
            return NOT_KEPT
        position = self._size_bytes
        line = as_json({"event": event, "time": round(time.time(), 6), **values}) + b"\n"
        if limit_bytes is not None and position + len(line) > limit_bytes:
            return NOT_KEPT
        try:
            _write_all(self._trajectory.fileno(), line)
        except OSError as error:
            log.warning("a line of a trajectory is lost", extra=fields(event=event, why=error.strerror))
            # The beginning of the line may have been written.
            with suppress(OSError):
                self._trajectory.truncate(position)
            return NOT_KEPT
        self._size_bytes += len(line)
        return position

    def _replace(self, name: str, chunks: Iterable[bytes]) -> None:
        target = self.folder / name
        partial = target.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
            os.replace(partial, target)  # noqa: PTH105  (documented as atomic)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


class CallPositions:
    """Where the calls of one episode are in its journal, by their sequence numbers from 1."""

    def __init__(self) -> None:
        # 8 bytes a call: an episode may have millions.
        self._positions = array("q")

    def set(self, seq: int, position: int) -> None:
        self._positions.extend([NOT_KEPT] * (seq - len(self._positions)))
        self._positions[seq - 1] = position

    def snapshot(self) -> array[int]:
        """The positions known so far, in the order of the sequence numbers."""
        return self._positions[:]


def _reserve(file: Path) -> None:
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, VERDICT_BYTES)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data: on a disk that becomes full, a write may stop in its middle without an error."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def _read_line(line: bytes) -> JsonObject | None:
    try:
        return as_object(json.loads(line))
    except (ValueError, RecursionError):
        return None


def _indented(value: JsonObject) -> bytes:
    # UTF-8 has no lone surrogates; Python's escape for them is also JSON's.
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def _warn_of_file(name: str, error: OSError | AtCapacityError) -> None:
    why = error.strerror if isinstance(error, OSError) else error.message
    log.warning("a file of an episode could not be kept", extra=fields(file=name, why=why))
