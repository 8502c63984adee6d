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
from itertools import chain, pairwise
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple, Self

from decathlon_mcp.errors import DiskFullError
from decathlon_mcp.storage.disk import (
    SMALL_BYTES,
    DiskSpace,
    append_to_regular,
    is_full,
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
LAST_LINE_BYTES = 1 << 16
"""More than the line `end` can have."""

_CALL_EVENTS = frozenset({"accepted", "call", "reply", "joined"})
_ORIGINS = frozenset({"accepted", "call", "joined"})
"""Lines that have members which a next server needs behind their long one."""
_SENT, _FAILED = 1, 2
_KNOWN = ("seq", "calls", "server", "tool", "failed")
"""What is counted of a line that is appended."""

log = logging.getLogger("decathlon.observe")


class CallLines(NamedTuple):
    """Both lines of a call that was sent, as they are, and where they begin in the file.

    `reply`: empty, and `reply_at` infinite, if there is none. `overlaps`: another call ran meanwhile.
    """

    seq: int
    call: bytes
    reply: bytes
    call_at: int
    reply_at: float
    overlaps: bool


@dataclass(slots=True)
class LoggedCalls:
    """What a server that starts later does with the calls in a trajectory."""

    keys: deque[LoggedKey] = field(default_factory=lambda: deque[LoggedKey](maxlen=MAX_KEYS))
    unanswered: list[JsonObject] = field(default_factory=list[JsonObject])
    """The last lines of the calls without a reply, in the order of their numbers."""


class SentCalls:
    """The calls that were sent up to now, in the order of their numbers.

    Their lines are read from disk one by one each time this is iterated: OSError if that fails.
    """

    def __init__(self, file: Path, index: Index) -> None:
        self._file = file
        self._calls, self._replies, self._flags = index.calls[:], index.replies[:], index.flags[:]

    def __iter__(self) -> Iterator[CallLines]:
        newest_reply = NOTHING
        with open_regular(self._file) as lines:
            for seq, following in pairwise(chain(self._sent(), (None,))):
                if seq is None:
                    return
                call_at, reply_at = self._calls[seq - 1], self._replies[seq - 1]
                next_at = math.inf if following is None else self._calls[following - 1]
                end = math.inf if reply_at == NOTHING else reply_at
                overlaps = newest_reply > call_at or end > next_at
                newest_reply = max(newest_reply, reply_at)
                call, reply = (read_line(lines, place, MAX_LINE_BYTES) for place in (call_at, reply_at))
                yield CallLines(seq, call, reply, call_at, end, overlaps)

    def places(self) -> Iterator[tuple[int, int]]:
        """The number of each call, and where its line begins."""
        return ((seq, self._calls[seq - 1]) for seq in self._sent())

    def objects(self) -> Iterator[tuple[JsonObject, JsonObject | None]]:
        """Both lines of each call as JSON; calls whose line cannot be read are skipped."""
        for lines in self:
            if (call := read_object(lines.call)) is not None:
                yield call, read_object(lines.reply)

    def _sent(self) -> Iterator[int]:
        return (seq for seq, flags in enumerate(self._flags[: len(self._calls)], 1) if flags & _SENT)


class Index:
    """Where the lines of a trajectory are, and what is counted of them.

    17 bytes a call: an episode may have millions. `timed`: with 16 more, for `call_times`.
    """

    def __init__(self, *, timed: bool = False) -> None:
        self.size_bytes = 0
        """How much of the file has been read."""
        self.inode = 0
        self.calls, self.replies, self.flags = array("q"), array("q"), bytearray()
        self.times, self.seconds = (array("d"), array("d")) if timed else (None, None)
        self.sent = self.answered = self.failed = self.notes_bytes = self.lines = self.last = 0
        self.tools = set[tuple[str, str]]()
        self.notes, self.note_calls = array("q"), array("q")
        self.placed: dict[str, int] = {}

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
            if event in _CALL_EVENTS or event == "note":
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
        missing = line.seq - len(self.calls)
        if missing > 0:
            if self.times is not None and self.seconds is not None:
                self.times.extend([line.time] * missing)
                self.seconds.extend([math.nan] * missing)
            self.flags.extend(bytes(missing))
            self.replies.extend([NOTHING] * missing)
            self.calls.extend([NOTHING] * missing)
        self.last = max(self.last, line.seq)  # after the tables: readers in other threads go by it
        if event != "reply":
            self.calls[at] = place
            if event == "call" and not self.flags[at] & _SENT:
                self.flags[at] |= _SENT
                self.sent += 1
                self.tools.add((line.server or "", line.tool or ""))
            return
        if self.replies[at] == NOTHING:
            self.count_reply(line.seq, failed=line.failed)
        self.replies[at] = place
        self.flags[at] = self.flags[at] & _SENT | (_FAILED if line.failed else 0)
        if self.seconds is not None and line.seconds is not None:
            self.seconds[at] = line.seconds

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

    def notes_before(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Of the notes before the calls with these numbers, how many calls were before, and its number."""
        return (
            (count, number) for number, count in enumerate(self.note_calls, 1) if first <= count + 1 <= last
        )

    def call_times(self) -> Iterator[tuple[float, float, bool]]:
        """Of each call when its line was written, how long it took (NaN: no reply), and whether it failed."""
        times, seconds = self.times or (), self.seconds or ()
        return zip(times, seconds, (bool(flags & _FAILED) for flags in self.flags), strict=False)


class Trajectory:
    """Appends lines, knows the place of every line, and reads them again. All methods block.

    `index`: what is known of the lines until now. The server that plays the episode appends (`create`,
    `reopen`); its lines about calls take at most `max_calls_bytes`, and SMALL_BYTES while `disk` is nearly
    full. Everybody else constructs one, also of an episode that plays, and calls `update`.
    """

    def __init__(
        self, folder: Path, *, max_calls_bytes: int = MAX_CALLS_BYTES, disk: DiskSpace | None = None
    ) -> None:
        self.folder, self.disk = folder, disk
        self.file = folder / TRAJECTORY_FILE
        self._max_calls_bytes = max_calls_bytes
        self.index = Index(timed=True)
        self._out: FileIO | None = None
        self._end = 0
        """Where the next line is appended."""
        self._is_torn = False
        """Whether the file may end with the beginning of a line that could not be written."""
        self._lock = Lock()

    @classmethod
    def create(
        cls, folder: Path, *, max_calls_bytes: int = MAX_CALLS_BYTES, disk: DiskSpace | None = None
    ) -> Self:
        """A new one, in a new folder that is readable by its owner alone. Raises OSError.

        Later a disk that fails is an error for lines of calls alone; it costs other lines, which is logged.
        """
        trajectory = cls(folder, max_calls_bytes=max_calls_bytes, disk=disk)
        trajectory.index = Index()
        folder.mkdir(parents=True, mode=0o700)
        try:
            trajectory._out = append_to_regular(trajectory.file, create=True)
        except BaseException:
            with suppress(OSError):
                folder.rmdir()
            raise
        return trajectory

    @classmethod
    def reopen(
        cls, folder: Path, *, max_calls_bytes: int = MAX_CALLS_BYTES, disk: DiskSpace | None = None
    ) -> Self:
        """Continue that of a server that ended; `read_calls` has its calls. Raises OSError.

        A last line that the server did not write completely is removed: what it describes did not happen.
        """
        trajectory = cls(folder, max_calls_bytes=max_calls_bytes, disk=disk)
        trajectory.index = Index()
        out = append_to_regular(trajectory.file)
        try:
            trajectory._end = end_of_lines(trajectory.file)
            out.truncate(trajectory._end)
        except BaseException:
            out.close()
            raise
        trajectory._out = out
        return trajectory

    # writing

    def add(self, event: str, **values: Any) -> bool:
        """Append a line: `event`, `time` (Unix seconds) and the values, which may be `msgspec.Raw`.

        False if it is not kept: a limit is reached, or this is closed. A disk that refuses a line of a call,
        which may be written later, is a DiskFullError; one that refuses another line is logged.
        """
        if event == "note" and self.disk is not None and self.disk.is_low():
            return False
        now = time.time()
        with self._lock:
            if self._out is None:
                return False
            line = as_json_with_raw({"event": event, "time": round(now, 6), **values}) + b"\n"
            if not self._may_add(event, len(line)) or not self._write(event, line):
                return False
            place, self._end = self._end, self._end + len(line)
            known = NO_MEMBERS
            if event in _CALL_EVENTS or event == "note":
                known = Line(**{name: values[name] for name in _KNOWN if name in values})
            self.index.add(event, known, place, len(line))
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

    def _write(self, event: str, line: bytes) -> bool:
        assert self._out is not None
        try:
            if self._is_torn:
                self._out.truncate(self._end)
                self._is_torn = False
            write_all(self._out.fileno(), line)
        except OSError as error:
            # The beginning of the line may have been written.
            self._is_torn = True
            with suppress(OSError):
                self._out.truncate(self._end)
                self._is_torn = False
            if event in _CALL_EVENTS and is_full(error):
                raise DiskFullError(
                    f"the server's disk cannot be written: {error.strerror}", retryAfterSeconds=RETRY_SECONDS
                ) from error
            log.warning("a line of a trajectory is lost", extra=fields(event=event, why=error.strerror))
            return False
        return True

    def close(self) -> None:
        """Append no more. The lines can still be read. A disk that fails is logged."""
        out, self._out = self._out, None
        try:
            if out is not None:
                out.close()
        except OSError as error:
            log.warning(
                "a trajectory could not be closed", extra=fields(file=TRAJECTORY_FILE, why=error.strerror)
            )

    def remove_calls(self, last: int) -> None:
        """Remove the lines of all calls up to this number, which will be made again. Raises OSError.

        Only before anything is appended; `read_calls` comes next.
        """
        kept = self.folder / f"{TRAJECTORY_FILE}.partial"
        with self._lock:
            with open_regular(self.file) as lines, open_regular(self.file) as source, kept.open("xb") as file:
                os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(lines.fileno()).st_mode))
                for place, size, prefix in find_lines(lines):
                    if not 0 < short_members(prefix).seq <= last:
                        source.seek(place)
                        file.write(source.read(size))
            os.replace(kept, self.file)  # noqa: PTH105  (documented as atomic)
            out = append_to_regular(self.file)
            self.close()
            self._out = out
            self._end = self.file.stat().st_size

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
                self.index = Index(timed=True)
                self.index.inode = status.st_ino
            self.index.read(lines)
        return self

    def forget(self) -> None:
        """Free the places of an episode that is over. What was counted stays."""
        index = self.index
        index.calls, index.replies, index.flags = array("q"), array("q"), bytearray()

    # reading

    def sent_calls(self) -> SentCalls:
        """The calls that were sent until now; what comes later does not affect them."""
        return SentCalls(self.file, self.index)

    def line(self, place: int) -> JsonObject | None:
        """The line at a place; None if there is none, or if it cannot be read. Raises OSError."""
        with open_regular(self.file) as lines:
            return read_object(read_line(lines, place, MAX_LINE_BYTES))

    def first(self, event: str) -> JsonObject:
        """The line `start`, `ready` or `claim`; empty if there is none. Raises OSError."""
        return self.line(self.index.placed.get(event, NOTHING)) or {}

    def why_unreadable(self) -> str | None:
        """Why there is no file to read; None if there is one."""
        # Not opened: a server that has no descriptor left can read it later.
        try:
            is_regular = stat.S_ISREG(self.file.lstat().st_mode)
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        return None if is_regular else "it is not a regular file"


def has_ended(folder: Path) -> bool:
    """Whether the last line of an episode's trajectory says that it is over. Raises OSError."""
    with open_regular(folder / TRAJECTORY_FILE) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_LINE_BYTES))
        *_, last = file.read(LAST_LINE_BYTES).splitlines() or [b""]
    return (read_object(last) or {}).get("event") == "end"
