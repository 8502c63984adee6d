"""The files of one episode: `trajectory.jsonl`, one event a line, and `verdict.json`.

A call has two lines of the trajectory: `call`, written before it is sent, and `reply`; `logged_calls` has all
of them, and reads them.

The room that is reserved for the verdict begins with a mark until then: how long the trajectory is, and its
CRC-32. So a server that continues the episode notices lines that are missing or were changed, and calls that
have run do not run again. The sandbox could tell as well what it has run. But one that an agent has taken
over would name calls that were never made, to have no verdict instead of a reward of 0.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any, Self

from decathlon_mcp.errors import AtCapacityError, DiskFullError
from decathlon_mcp.storage.disk import (
    SMALL_BYTES,
    DiskSpace,
    append_to_regular,
    is_full,
    new_file,
    open_regular,
    write_all,
)
from decathlon_mcp.storage.logged_calls import NOT_KEPT, LoggedCalls, Positions, read_calls, seq_of
from decathlon_mcp.storage.trajectory import TRAJECTORY_FILE, TrajectoryCalls, read_line
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, as_json_with_raw, read_object

MAX_NOTE_LINE_BYTES = 64 << 10
MAX_NOTES = 20_000
"""Notes of one episode."""
NOTES_SHARE = 4
"""The notes of an episode take at most this part of what its calls may take, in addition."""
MAX_CALLS_BYTES = 256 << 20
"""Default limit on the calls in one trajectory."""
VERDICT_BYTES = 256 << 10
"""Room on the disk that is reserved for the verdict: several times the longest that there can be."""
_MARK = re.compile(rb"(\d{16}) ([0-9a-f]{8})\n")
_MARK_BYTES = 26
VERDICT_FILE = "verdict.json"
"""The episode's own verdict; regradings are in further files."""
_CHUNK_BYTES = 64 << 10
RETRY_SECONDS = 5.0
"""When a client may try again that was refused because the disk cannot be written."""

log = logging.getLogger("decathlon.observe")


class Journal:
    """Writes and reads the folder of one episode, which is readable by its owner alone.

    The calls take at most `max_calls_bytes`, and SMALL_BYTES while `disk` is nearly full. Room for the
    verdict is reserved from the start. Creating a journal raises OSError, for a full disk too. Later a disk
    that fails is an error for lines of calls alone; it costs other lines and files, which is logged.
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
        self._notes = self._notes_bytes = 0
        # The CRC-32 of the trajectory; None if it is not known. Then the mark stays as it is: it remains true
        # of the trajectory's beginning.
        self._check: int | None = 0
        self._mark: int | None = None
        self._found_mark: tuple[int, int] | None = None
        self._reserved = folder / ".verdict.reserved"
        self._trajectory: FileIO | None = None
        self._is_torn = False
        """Whether the trajectory may end with the beginning of a line that could not be written."""
        if create:
            self._create()
            self._trajectory = append_to_regular(folder / TRAJECTORY_FILE)
        self._lock = Lock()
        """Held while the trajectory is written: `remove_calls` runs in a thread."""

    @classmethod
    def reopen(
        cls, folder: Path, *, max_calls_bytes: int = MAX_CALLS_BYTES, disk: DiskSpace | None = None
    ) -> Self:
        """Continue the journal of a server that ended. Raises OSError if its trajectory cannot be opened.

        A last line that the server did not write completely is removed: what it describes did not happen.
        """
        journal = cls(folder, max_calls_bytes=max_calls_bytes, disk=disk, create=False)
        trajectory = append_to_regular(folder / TRAJECTORY_FILE)
        try:
            journal._size_bytes = _end_of_lines(folder / TRAJECTORY_FILE)
            trajectory.truncate(journal._size_bytes)
        except BaseException:
            trajectory.close()
            raise
        journal._trajectory = trajectory
        for unfinished in folder.glob("*.partial"):
            unfinished.unlink(missing_ok=True)
        journal._check = None  # `read_calls` finds it out
        if not (folder / VERDICT_FILE).exists():
            try:
                journal._mark = _reserve(journal._reserved)
                journal._found_mark = _read_mark(journal._mark)
            except OSError as error:
                _warn_of_file(journal._reserved.name, error)
        return journal

    @classmethod
    def of_ended(cls, folder: Path, *, disk: DiskSpace | None = None) -> Self:
        """The closed journal of an episode that is over, whatever is in its folder. Opens nothing."""
        return cls(folder, disk=disk, create=False)

    def _create(self) -> None:
        # Created at once, so that a full disk is found before the episode starts.
        self.folder.mkdir(parents=True, mode=0o700)
        try:
            self._mark = _reserve(self._reserved)
            (self.folder / TRAJECTORY_FILE).touch(exist_ok=False)
        except OSError:
            self._release_mark()
            self._reserved.unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()
            raise

    def add(self, event: str, **values: Any) -> None:
        """Append one line: `event`, `time` (Unix seconds) and the values. Does nothing once closed."""
        self._append(event, values)

    def add_call(self, **values: Any) -> int:
        """Append the line `call` and return its position. Values may be `msgspec.Raw` without line feeds.

        Returns NOT_KEPT if a limit is reached or the journal is closed. Raises DiskFullError if the disk
        refuses the line, which may be written later.
        """
        return self._append("call", values, is_limited=True)

    def add_accepted(self, **values: Any) -> bool:
        """Append the line `accepted` of a call that is not sent yet; False where `add_call` has NOT_KEPT.

        Raises DiskFullError.
        """
        return self._append("accepted", values, is_limited=True) != NOT_KEPT

    def add_reply(self, **values: Any) -> int:
        """Append the line `reply` of a call and return its position, or NOT_KEPT. Raises as `add_call`."""
        return self._append("reply", values, is_limited=True)

    def add_note(self, **values: Any) -> bool:
        """Append the line `note`; False if it is too long, there are too many, or the disk is nearly full.

        Notes take no room from the calls.
        """
        if self._notes >= MAX_NOTES or (self.disk is not None and self.disk.is_low()):
            return False
        left_bytes = self._max_calls_bytes // NOTES_SHARE - self._notes_bytes
        before = self._size_bytes
        if self._append("note", values, line_bytes=min(MAX_NOTE_LINE_BYTES, left_bytes)) == NOT_KEPT:
            return False
        self._notes += 1
        self._notes_bytes += self._size_bytes - before
        return True

    def add_joined(self, **values: Any) -> None:
        """Append the line `joined`, within the limit on calls."""
        with suppress(DiskFullError):
            self._append("joined", values, is_limited=True)

    def calls_at(self, positions: Iterable[Positions]) -> TrajectoryCalls:
        """The calls at these positions."""
        return TrajectoryCalls(self.folder / TRAJECTORY_FILE, positions)

    def line_at(self, position: int) -> JsonObject | None:
        """Read one line; None if it was not kept or cannot be read."""
        try:
            with open_regular(self.folder / TRAJECTORY_FILE) as lines:
                return read_line(lines, position)
        except OSError as error:
            _warn_of_file(TRAJECTORY_FILE, error)
            return None

    def read_calls(self) -> LoggedCalls:
        """Read what `reopen` found about the calls, and whether lines are missing or were changed.

        Takes about a second for 256 MiB: run it in a thread.
        """
        with open_regular(self.folder / TRAJECTORY_FILE) as lines:
            checked = _CheckedLines(lines, self._found_mark)
            logged = read_calls(checked)
        self._notes, self._notes_bytes = logged.notes, logged.notes_bytes
        logged.damage = checked.damage
        if logged.damage is None and checked.size_bytes == self._size_bytes:
            self._check = checked.check
        return logged

    def remove_calls(self, last: int) -> None:
        """Remove the lines of all calls up to this number, which will be made again. Raises OSError.

        Only after `read_calls` has found no damage, and before anything is appended.
        """
        kept = self.folder / f"{TRAJECTORY_FILE}.partial"
        with self._lock:
            with open_regular(self.folder / TRAJECTORY_FILE) as lines, kept.open("xb") as file:
                os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(lines.fileno()).st_mode))
                file.writelines(line for line in lines if not 0 < seq_of(line) <= last)
            if self._mark is not None:
                # A server that dies before the next line leaves a mark that is true of any file.
                os.pwrite(self._mark, bytes(_MARK_BYTES), 0)
            os.replace(kept, self.folder / TRAJECTORY_FILE)  # noqa: PTH105  (documented as atomic)
            self._close_trajectory()
            self._trajectory = append_to_regular(self.folder / TRAJECTORY_FILE)
            self._size_bytes = (self.folder / TRAJECTORY_FILE).stat().st_size
            self._found_mark, self._check = None, None

    def damage(self) -> str | None:
        """Why the trajectory cannot be what was written since it was opened; None if it can be."""
        try:
            size_bytes = (self.folder / TRAJECTORY_FILE).stat().st_size
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        return None if size_bytes == self._size_bytes else _other_size(size_bytes, self._size_bytes)

    def events(self, event: str) -> Iterator[JsonObject]:
        """Read the lines of one kind, in order. Lines that cannot be read are skipped."""
        with open_regular(self.folder / TRAJECTORY_FILE) as lines:
            for line in lines:
                if (value := read_object(line)) is not None and value.get("event") == event:
                    yield value

    def write_verdict(self, verdict: JsonObject) -> None:
        """Write or replace `verdict.json`; the first time into the room that is reserved for it."""
        data = _indented(verdict)
        self._release_mark()
        try:
            if len(data) <= VERDICT_BYTES and self._reserved.exists():
                # Overwrites blocks that the file has already, so that a full disk cannot refuse them.
                with self._reserved.open("r+b", buffering=0) as file:
                    write_all(file.fileno(), data)
                    file.truncate(len(data))
                os.replace(self._reserved, self.folder / VERDICT_FILE)  # noqa: PTH105  (documented as atomic)
            else:
                self._reserved.unlink(missing_ok=True)
                self._replace(VERDICT_FILE, (data,))
        except OSError as error:
            _warn_of_file(VERDICT_FILE, error)

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
        # A disk can fail at each of them: also a `close` tells what could not be written.
        for step in (
            self._close_trajectory,
            self._release_mark,
            partial(self._reserved.unlink, missing_ok=True),
        ):
            try:
                step()
            except OSError as error:
                _warn_of_file(self._reserved.name, error)

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

    def _append(
        self, event: str, values: JsonObject, *, is_limited: bool = False, line_bytes: int | None = None
    ) -> int:
        """`is_limited`: a line of a call, see `add_call`. `line_bytes`: limit on the line."""
        with self._lock:
            if self._trajectory is None:
                return NOT_KEPT
            position = self._size_bytes
            line = as_json_with_raw({"event": event, "time": round(time.time(), 6), **values}) + b"\n"
            if line_bytes is not None and len(line) > line_bytes:
                return NOT_KEPT
            if is_limited and self._exceeds_limit(position + len(line) - self._notes_bytes):
                return NOT_KEPT
            try:
                if self._is_torn:
                    self._trajectory.truncate(position)
                    self._is_torn = False
                write_all(self._trajectory.fileno(), line)
            except OSError as error:
                # The beginning of the line may have been written.
                self._is_torn = True
                with suppress(OSError):
                    self._trajectory.truncate(position)
                    self._is_torn = False
                if is_limited and is_full(error):
                    raise DiskFullError(
                        f"the server's disk cannot be written: {error.strerror}",
                        retryAfterSeconds=RETRY_SECONDS,
                    ) from error
                log.warning("a line of a trajectory is lost", extra=fields(event=event, why=error.strerror))
                return NOT_KEPT
            self._size_bytes += len(line)
            if self._check is not None:
                # Takes 0.2 ms for each MiB.
                self._check = zlib.crc32(line, self._check)
                self._write_mark()
            return position

    def _write_mark(self) -> None:
        if self._mark is not None:
            # Into blocks that the file has.
            with suppress(OSError):
                os.pwrite(self._mark, b"%016d %08x\n" % (self._size_bytes, self._check), 0)

    def _close_trajectory(self) -> None:
        trajectory, self._trajectory = self._trajectory, None
        if trajectory is not None:
            trajectory.close()

    def _release_mark(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            os.close(mark)

    def _replace(self, name: str, chunks: Iterable[bytes]) -> None:
        target = self.folder / name
        with new_file(target, target.with_suffix(".partial")) as file:
            for chunk in chunks:
                file.write(chunk)


class _CheckedLines:
    """The lines of a trajectory, compared with its mark while they are read.

    `mark`: the length and the CRC-32 of what was written at least; None if that is not known.
    """

    def __init__(self, lines: Iterable[bytes], mark: tuple[int, int] | None) -> None:
        self.size_bytes = self.check = 0
        self._lines = lines
        self._mark = mark
        self._matches = mark in (None, (0, 0))

    def __iter__(self) -> Iterator[bytes]:
        for line in self._lines:
            self.size_bytes += len(line)
            self.check = zlib.crc32(line, self.check)
            self._matches = self._matches or (self.size_bytes, self.check) == self._mark
            yield line

    @property
    def damage(self) -> str | None:
        """How the lines differ from what was written, once all have been read."""
        if self._matches or self._mark is None:
            return None
        if self.size_bytes < self._mark[0]:
            return _other_size(self.size_bytes, self._mark[0])
        return "it has other bytes than were written"


def _other_size(size_bytes: int, written_bytes: int) -> str:
    return f"it has {size_bytes:,} bytes of {written_bytes:,} that were written"


def _reserve(file: Path) -> int:
    """Reserve room for a verdict; returns the file's descriptor."""
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, VERDICT_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read_mark(descriptor: int) -> tuple[int, int] | None:
    """The mark; None for a file without one."""
    found = _MARK.fullmatch(os.pread(descriptor, _MARK_BYTES, 0))
    return None if found is None else (int(found[1]), int(found[2], 16))


def _end_of_lines(file: Path) -> int:
    """The size of a file up to the end of its last complete line, in bytes."""
    with open_regular(file) as data:
        end = data.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _CHUNK_BYTES)
            data.seek(start)
            if (found := data.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0


def _indented(value: JsonObject) -> bytes:
    # UTF-8 has no lone surrogates; Python's escape for them is also JSON's.
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def _warn_of_file(name: str, error: OSError | AtCapacityError) -> None:
    why = error.strerror if isinstance(error, OSError) else error.message
    log.warning("a file of an episode could not be kept", extra=fields(file=name, why=why))
