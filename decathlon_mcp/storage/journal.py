"""The files of one episode: `trajectory.jsonl`, one event a line, and `verdict.json`.

A call has two lines of the trajectory: `call`, written before it is sent, and `reply`; `logged_calls` has all
of them, and reads them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.storage.disk import SMALL_BYTES, DiskSpace, write_all
from decathlon_mcp.storage.logged_calls import NOT_KEPT, LoggedCalls, Positions, merged, read_calls
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, as_json_with_raw, as_object

MAX_CALLS_BYTES = 256 << 20
"""Default limit on the calls in one trajectory."""
VERDICT_BYTES = 256 << 10
"""Room on the disk that is reserved for the verdict: several times the longest that there can be."""
_TRAJECTORY = "trajectory.jsonl"
VERDICT = "verdict.json"
"""Name of the file."""
_CHUNK_BYTES = 64 << 10

log = logging.getLogger("decathlon.observe")


class Journal:
    """Writes and reads the folder of one episode, which is readable by its owner alone.

    The calls take at most `max_calls_bytes`, and SMALL_BYTES while `disk` is nearly full. Room for the
    verdict is reserved from the start. Creating a journal raises OSError, for a full disk too; later a disk
    that fails costs lines and files, which is logged, and never the episode.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_calls_bytes: int = MAX_CALLS_BYTES,
        disk: DiskSpace | None = None,
        create: bool = True,
    ) -> None:
        self.folder = folder
        self._max_calls_bytes = max_calls_bytes
        self.disk = disk
        self._size_bytes = 0
        self._reserved = folder / ".verdict.reserved"
        if create:
            self._create()
        self._trajectory = (folder / _TRAJECTORY).open("ab", buffering=0)

    @classmethod
    def reopen(
        cls, folder: Path, *, max_calls_bytes: int = MAX_CALLS_BYTES, disk: DiskSpace | None = None
    ) -> Self:
        """Continue the journal of a server that ended. Raises OSError if its trajectory cannot be opened.

        A last line that the server did not write completely is removed: what it describes did not happen.
        """
        journal = cls(folder, max_calls_bytes=max_calls_bytes, disk=disk, create=False)
        journal._size_bytes = _end_of_lines(folder / _TRAJECTORY)
        journal._trajectory.truncate(journal._size_bytes)
        for partial in folder.glob("*.partial"):
            partial.unlink(missing_ok=True)
        if not (folder / VERDICT).exists():
            try:
                _reserve(journal._reserved)
            except OSError as error:
                _warn_of_file(journal._reserved.name, error)
        return journal

    def _create(self) -> None:
        # Created at once, so that a full disk is found before the episode starts.
        self.folder.mkdir(parents=True, mode=0o700)
        try:
            _reserve(self._reserved)
            (self.folder / _TRAJECTORY).touch(exist_ok=False)
        except OSError:
            self._reserved.unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()
            raise

    def add(self, event: str, **values: Any) -> None:
        """Append one line: `event`, `time` (Unix seconds) and the values. Does nothing once closed."""
        self._append(event, values, is_limited=False)

    def add_call(self, **values: Any) -> int:
        """Append the line `call` and return its position. Values may be `msgspec.Raw` without line feeds.

        Returns NOT_KEPT if a limit is reached, the disk refuses the line, or the journal is closed.
        """
        return self._append("call", values, is_limited=True)

    def add_accepted(self, **values: Any) -> bool:
        """Append the line `accepted` of a call that is not sent yet; False where `add_call` has NOT_KEPT."""
        return self._append("accepted", values, is_limited=True) != NOT_KEPT

    def add_reply(self, **values: Any) -> int:
        """Append the line `reply` of a call and return its position, or NOT_KEPT as `add_call` does."""
        return self._append("reply", values, is_limited=True)

    def add_joined(self, **values: Any) -> None:
        """Append the line `joined`, within the limit on calls."""
        self._append("joined", values, is_limited=True)

    def calls_at(self, positions: Iterable[Positions]) -> Iterator[JsonObject]:
        """Read calls, one after another: the members of both lines as one object.

        A call without a reply lacks the reply's members. Calls that were not kept or cannot be read are
        skipped.
        """
        with (self.folder / _TRAJECTORY).open("rb") as lines:
            for at in positions:
                if at.call != NOT_KEPT:
                    lines.seek(at.call)
                    call, reply = _read_line(lines.readline()), None
                    if at.reply != NOT_KEPT:
                        lines.seek(at.reply)
                        reply = _read_line(lines.readline())
                    if call is not None:
                        yield merged(call, reply)

    def line_at(self, position: int) -> JsonObject | None:
        """Read one line; None if it was not kept or cannot be read."""
        if position == NOT_KEPT:
            return None
        try:
            with (self.folder / _TRAJECTORY).open("rb") as lines:
                lines.seek(position)
                return _read_line(lines.readline())
        except OSError as error:
            _warn_of_file(_TRAJECTORY, error)
            return None

    def read_calls(self) -> LoggedCalls:
        """Read what `reopen` found about the calls. Takes about a second for 256 MiB: run it in a thread."""
        with (self.folder / _TRAJECTORY).open("rb") as lines:
            return read_calls(lines)

    def events(self, event: str) -> Iterator[JsonObject]:
        """Read the lines of one kind, in order. Lines that cannot be read are skipped."""
        with (self.folder / _TRAJECTORY).open("rb") as lines:
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
                    write_all(file.fileno(), data)
                    file.truncate(len(data))
                os.replace(self._reserved, self.folder / VERDICT)  # noqa: PTH105  (documented as atomic)
            else:
                self._reserved.unlink(missing_ok=True)
                self._replace(VERDICT, (data,))
        except OSError as error:
            _warn_of_file(VERDICT, error)

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

    def discard(self) -> None:
        """Delete the folder of an episode that could not be started."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _exceeds_limit(self, size_bytes: int) -> bool:
        """Whether the calls may not make the trajectory so long."""
        # A short one does not ask the disk, which would cost more than to write the line.
        return size_bytes > self._max_calls_bytes or (
            size_bytes > SMALL_BYTES and self.disk is not None and self.disk.is_low()
        )

    def _append(self, event: str, values: JsonObject, *, is_limited: bool) -> int:
        if self._trajectory.closed:
            return NOT_KEPT
        position = self._size_bytes
        line = as_json_with_raw({"event": event, "time": round(time.time(), 6), **values}) + b"\n"
        if is_limited and self._exceeds_limit(position + len(line)):
            return NOT_KEPT
        try:
            write_all(self._trajectory.fileno(), line)
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


def _reserve(file: Path) -> None:
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, VERDICT_BYTES)
    finally:
        os.close(descriptor)


def _end_of_lines(file: Path) -> int:
    """The size of a file up to the end of its last complete line, in bytes."""
    with file.open("rb") as data:
        end = data.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _CHUNK_BYTES)
            data.seek(start)
            if (found := data.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0


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
