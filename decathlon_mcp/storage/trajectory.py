"""What happened in an episode: its trajectory, `trajectory.jsonl`, one event a line.

A call's number, `seq`, counts from 1. The line `call` is written before the call is sent, the line `reply`
when the reply is there, with one of `result` (of the tool), `error` (a JSON-RPC error of the task's server)
and `failure` (an error of this server). A call that has to wait before it is sent, for the set-up or for its
server's start, has a line `accepted` until then: if it is never sent, it counts for nothing. A line `joined`
has the keys of another request that gets the same reply. A line `note` is a message of the model's own.

The other lines are `start`, the first, with what was fixed at the start; `ready`, with the prompt and the
digest of the tools; `preprocess_failed`, `difference`, `claim` and `end`. A call that was made again, of the
episode that this one branches from, has `"replayed": true` in its lines `accepted` and `call`.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple, Self

from decathlon_mcp.errors import DiskFullError
from decathlon_mcp.storage.disk import (
    SMALL_BYTES,
    DiskSpace,
    append_to_regular,
    is_full,
    new_file,
    open_regular,
    write_all,
)
from decathlon_mcp.storage.trajectory_lines import (
    MAX_KEYS,
    MAX_LINE_BYTES,
    NO_MEMBERS,
    NOTHING,
    Line,
    LoggedKey,
    decoded,
    end_of_lines,
    event_of,
    find_lines,
    read_line,
    short_members,
)
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, as_json_with_raw, read_object

TRAJECTORY_FILE = "trajectory.jsonl"
MAX_CALLS_BYTES = 256 << 20
"""Default limit on the lines of calls in one trajectory."""
MAX_NOTES = 20_000
"""Notes of one episode."""
MAX_NOTE_LINE_BYTES = 64 << 10
NOTES_SHARE = 4
"""The notes of an episode take at most this part of what its calls may take, in addition."""
RETRY_SECONDS = 5.0
"""When a client may try again that was refused because the disk cannot be written."""
MAX_SKIPPED_CALLS = 100_000
"""Numbers without a line in a trajectory: damaged lines must not make the tables as long as they like."""

_CALL_EVENTS = frozenset({"accepted", "call", "reply", "joined"})
_INDEXED_EVENTS = _CALL_EVENTS | {"note"}
_ORIGINS = frozenset({"accepted", "call", "joined"})
"""Lines that have members which a next server needs behind their long one."""
_SENT, _FAILED = 1, 2
_INDEXED_MEMBERS = ("seq", "calls", "server", "tool", "failed", "seconds")

log = logging.getLogger("decathlon.observe")


class CallLines(NamedTuple):
    """Both lines of a call that was sent, as they are, and where they begin in the file.

    `reply`: empty, and `reply_at` infinite, if there is none.
    """

    seq: int
    call: bytes
    reply: bytes
    call_at: int
    reply_at: float


@dataclass(slots=True)
class LoggedCalls:
    """What a server that starts later does with the calls in a trajectory."""

    keys: deque[LoggedKey] = field(default_factory=lambda: deque[LoggedKey](maxlen=MAX_KEYS))
    unanswered: list[JsonObject] = field(default_factory=list[JsonObject])
    """The last lines of the calls without a reply, in the order of their numbers."""


class Index:
    """Where the lines of a trajectory are, and what is counted of them.

    33 bytes a call: an episode may have millions.
    """

    def __init__(self) -> None:
        self.size_bytes = self.inode = 0
        """How much of which file has been read."""
        # Of each call, by its number: where its lines begin, when its line was written, how long it took.
        self.calls, self.replies = array("q"), array("q")
        self.times, self.seconds = array("d"), array("d")
        self.flags = bytearray()
        self.sent = self.answered = self.failed = self.notes_bytes = self.lines = self.last = 0
        self.tools = set[tuple[str, str]]()
        self.notes, self.note_calls = array("q"), array("q")
        """Of each note, where it begins, and how many calls there were before."""
        self.placed: dict[str, int] = {}
        """Where the lines `start`, `ready` and `claim` begin."""

    def read(
        self,
        lines: BinaryIO,
        *,
        whole: Collection[str] = (),
        visit: Callable[[str, Line, bytes], None] = lambda event, line, data: None,
    ) -> None:
        """Add the lines that come after those that have been read. `visit`: is given those about calls."""
        for place, size, data in find_lines(lines, self.size_bytes, whole=whole):
            event, line = event_of(data), NO_MEMBERS
            # Of others they are not needed. They can be long, and labels have any names.
            if event in _INDEXED_EVENTS:
                line = decoded(data) if event in whole else short_members(data)
            # No server can have given a number that is much higher.
            if line.seq <= self.lines + MAX_SKIPPED_CALLS:
                self.add(event, line, place, size)
                visit(event, line, data)
            self.size_bytes = place + size

    def add(self, event: str, line: Line, place: int, size: int) -> None:
        match event:
            case "accepted" | "call" | "reply" if line.seq > 0:
                self._add_call(event, line, place)
            case "note":
                self.note_calls.append(line.calls)
                self.notes.append(place)
                self.notes_bytes += size
            case "ready":  # the newest: a set-up may have started over
                self.placed["ready"] = place
            case "start" | "claim":
                self.placed.setdefault(event, place)
            case _:
                pass

    def _add_call(self, event: str, line: Line, place: int) -> None:
        self.lines += 1
        at = line.seq - 1
        if (missing := line.seq - len(self.calls)) > 0:
            self.times.extend([line.time] * missing)
            self.seconds.extend([math.nan] * missing)
            self.flags.extend(bytes(missing))
            self.replies.extend([NOTHING] * missing)
            self.calls.extend([NOTHING] * missing)
            self.last = line.seq  # after the tables: readers in other threads go by it
        if event == "reply":
            if self.replies[at] == NOTHING:
                self.count_reply(line.seq, failed=line.failed)
            self.replies[at] = place
            self.flags[at] = self.flags[at] & _SENT | (_FAILED if line.failed else 0)
            if line.seconds is not None:
                self.seconds[at] = line.seconds
            return
        self.calls[at] = place
        if event == "call" and not self.flags[at] & _SENT:
            self.flags[at] |= _SENT
            self.sent += 1
            self.tools.add((line.server or "", line.tool or ""))

    def count_reply(self, seq: int, *, failed: bool) -> None:
        """Count the reply to a call, if it was sent."""
        if seq <= len(self.flags) and self.flags[seq - 1] & _SENT:
            self.answered += 1
            self.failed += failed

    def places(self, seq: int) -> tuple[int, int]:
        """Where a call's line, `call` or `accepted`, and its reply begin; NOTHING for a missing one."""
        if 1 <= seq <= len(self.calls):
            return self.calls[seq - 1], self.replies[seq - 1]
        return NOTHING, NOTHING

    def has_failed(self, seq: int) -> bool:
        return bool(self.flags[seq - 1] & _FAILED)


class SentCalls:
    """The calls that were sent up to now, in the order of their numbers.

    Their lines are read from disk one by one each time this is iterated: OSError if that fails.
    """

    def __init__(self, file: Path, index: Index) -> None:
        self._file = file
        self._calls, self._replies, self._flags = index.calls[:], index.replies[:], index.flags[:]

    def __iter__(self) -> Iterator[CallLines]:
        with open_regular(self._file) as lines:
            for seq, call_at, reply_at in self.places():
                call, reply = (read_line(lines, place, MAX_LINE_BYTES) for place in (call_at, reply_at))
                yield CallLines(seq, call, reply, call_at, math.inf if reply_at == NOTHING else reply_at)

    def places(self) -> Iterator[tuple[int, int, int]]:
        """The number of each call, and where its lines begin."""
        tables = zip(self._calls, self._replies, self._flags, strict=False)
        return ((seq, call, reply) for seq, (call, reply, flags) in enumerate(tables, 1) if flags & _SENT)


class Trajectory:
    """Appends lines, knows the place of every line, and reads them again. All methods block.

    The server that plays the episode appends, after `create` or `reopen`; its lines about calls take at most
    `max_calls_bytes`, and SMALL_BYTES while `disk` is nearly full. Everybody else calls `update`, also for an
    episode that plays.
    """

    def __init__(
        self, folder: Path, *, max_calls_bytes: int = MAX_CALLS_BYTES, disk: DiskSpace | None = None
    ) -> None:
        self.folder, self.disk = folder, disk
        self.file = folder / TRAJECTORY_FILE
        self._max_calls_bytes = max_calls_bytes
        self.index = Index()
        """What is known of the lines until now."""
        self._out: FileIO | None = None
        self._end = 0
        """Where the next line is appended."""
        self._is_torn = False
        """Whether the file may end with the beginning of a line that could not be written."""
        self._lock = Lock()

    def create(self) -> Self:
        """Begin a new one, in a new folder that is readable by its owner alone. Raises OSError."""
        self.folder.mkdir(parents=True, mode=0o700)
        try:
            self._out = append_to_regular(self.file, create=True)
        except BaseException:
            with suppress(OSError):
                self.folder.rmdir()
            raise
        return self

    def reopen(self) -> Self:
        """Continue that of a server that ended; `read_calls` has its calls. Raises OSError.

        A last line that the server did not write completely is removed: what it describes did not happen.
        """
        out = append_to_regular(self.file)
        try:
            self._end = end_of_lines(self.file)
            out.truncate(self._end)
        except BaseException:
            out.close()
            raise
        self._out = out
        return self

    # writing

    def add(self, event: str, **values: Any) -> bool:
        """Append a line: `event`, `time` (Unix seconds) and the values, which may be `msgspec.Raw`.

        False if it is not kept: a limit is reached, or this is closed. A disk that refuses a line of a call,
        which may be written later, is a DiskFullError; one that refuses another line is logged.
        """
        if event == "note" and self.disk is not None and self.disk.is_low():
            return False
        now = round(time.time(), 6)
        with self._lock:
            if self._out is None:
                return False
            line = as_json_with_raw({"event": event, "time": now, **values}) + b"\n"
            if not self._may_add(event, len(line)) or not self._write(self._out, event, line):
                return False
            place, self._end = self._end, self._end + len(line)
            members = NO_MEMBERS
            if event in _INDEXED_EVENTS:
                members = Line(now, **{name: values[name] for name in _INDEXED_MEMBERS if name in values})
            self.index.add(event, members, place, len(line))
        return True

    def _may_add(self, event: str, size_bytes: int) -> bool:
        index = self.index
        if event == "note":
            left_bytes = self._max_calls_bytes // NOTES_SHARE - index.notes_bytes
            return len(index.notes) < MAX_NOTES and size_bytes <= min(MAX_NOTE_LINE_BYTES, left_bytes)
        if event not in _CALL_EVENTS:
            return True
        # Notes take no room from the calls. A short file does not ask the disk, which would cost more than to
        # write the line.
        total_bytes = self._end + size_bytes - index.notes_bytes
        return total_bytes <= self._max_calls_bytes and (
            total_bytes <= SMALL_BYTES or self.disk is None or not self.disk.is_low()
        )

    def _write(self, out: FileIO, event: str, line: bytes) -> bool:
        try:
            if self._is_torn:
                out.truncate(self._end)
            self._is_torn = True
            write_all(out.fileno(), line)
            self._is_torn = False
        except OSError as error:
            with suppress(OSError):
                out.truncate(self._end)
            if event in _CALL_EVENTS and is_full(error):
                raise DiskFullError(
                    f"the server's disk cannot be written: {error.strerror}", retryAfterSeconds=RETRY_SECONDS
                ) from error
            log.warning("a line of a trajectory is lost", extra=fields(event=event, why=error.strerror))
        return not self._is_torn

    def close(self) -> None:
        """Append no more. The lines can still be read. A disk that fails is logged."""
        out, self._out = self._out, None
        try:
            if out is not None:
                out.close()
        except OSError as error:
            why = fields(file=TRAJECTORY_FILE, why=error.strerror)
            log.warning("a trajectory could not be closed", extra=why)

    def remove_calls(self, last: int) -> None:
        """Remove the lines of all calls up to this number, which will be made again. Raises OSError.

        Only before anything is appended; `read_calls` comes next.
        """
        with self._lock:
            with (
                open_regular(self.file) as lines,
                open_regular(self.file) as source,
                new_file(self.file, self.folder / f"{TRAJECTORY_FILE}.partial") as kept,
            ):
                for place, size, prefix in find_lines(lines):
                    if not 0 < short_members(prefix).seq <= last:
                        source.seek(place)
                        kept.write(source.read(size))
                self._end = kept.tell()
            self.close()
            self._out = append_to_regular(self.file)

    # finding

    def read_calls(self) -> LoggedCalls:
        """Find the lines that a dead server has left. Takes about a second for 256 MiB; raises OSError."""
        index, logged = Index(), LoggedCalls()
        unanswered: dict[int, bytes] = {}
        accepted: set[int] = set()

        def visit(event: str, line: Line, data: bytes) -> None:
            if event == "reply":
                unanswered.pop(line.seq, None)
            elif event in ("accepted", "call"):
                unanswered[line.seq] = data
            # The line `call` of one that was accepted before has the same.
            if line.digest is not None and not (event == "call" and line.seq in accepted):
                logged.keys += [LoggedKey(key, line.digest, line.seq) for key in line.keys]
            if event == "accepted":
                accepted.add(line.seq)

        with open_regular(self.file) as lines:
            index.read(lines, whole=_ORIGINS, visit=visit)
            with self._lock:  # what was appended meanwhile
                index.read(lines, whole=_ORIGINS, visit=visit)
                self.index = index
        last_lines = (unanswered[seq] for seq in sorted(unanswered))
        logged.unanswered = [call for data in last_lines if (call := read_object(data))]
        return logged

    def update(self) -> Self:
        """Find the lines that were written since the last time. Raises OSError."""
        with self._lock, open_regular(self.file) as lines:
            status = os.fstat(lines.fileno())
            if status.st_ino != self.index.inode or status.st_size < self.index.size_bytes:
                self.index = Index()
                self.index.inode = status.st_ino
            self.index.read(lines)
        return self

    def forget(self) -> None:
        """Free the places of an episode that is over. What was counted stays."""
        index = self.index
        index.calls, index.replies, index.flags = array("q"), array("q"), bytearray()
        index.times, index.seconds = array("d"), array("d")

    # reading

    def sent_calls(self) -> SentCalls:
        """The calls that were sent until now; what comes later does not affect them."""
        return SentCalls(self.file, self.index)

    def line(self, place: int) -> JsonObject | None:
        """The line at a place; None if there is none, or if it cannot be read. Raises OSError."""
        with open_regular(self.file) as lines:
            return read_object(read_line(lines, place, MAX_LINE_BYTES))

    def why_unreadable(self) -> str | None:
        """Why there is no file to read; None if there is one."""
        # Not opened: a server that has no descriptor left can read it later.
        try:
            is_regular = stat.S_ISREG(self.file.lstat().st_mode)
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        return None if is_regular else "it is not a regular file"
