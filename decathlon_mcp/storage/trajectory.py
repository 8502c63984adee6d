"""The trajectory of an episode, `trajectory.jsonl`: the events in it, one a line.

A call's number, `seq`, counts from 1. The line `call` is written before the call is sent, the line `reply`
when the reply is there, with one of `result` (of the tool), `error` (a JSON-RPC error of the task's server)
and `failure` (an error of this server). A call that has to wait before it is sent, for the set-up or for its
server's start, has a line `accepted` until then: if it is never sent, it counts for nothing. A line `joined`
has the keys of another request that gets the same reply. A line `note` is a message of the model's own.

The other lines are `start`, the first, with what was fixed at the start; `ready`, with the prompt and the
digest of the tools; `preprocess_failed`, `difference`, `claim` and `end`. A call that was made again, of the
episode that this episode branches from, has `"replayed": true` in its lines `accepted` and `call`.

A trajectory has up to 256 MiB, and parsing JSON holds the interpreter's lock. So readers find lines by their
places, and of a long line only the members before its long value are decoded. Every bound is for a file that
is damaged or comes from somewhere else.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import re
import stat
import time
from array import array
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, BinaryIO, NamedTuple, Self, TypeAlias

import msgspec

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
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, as_json_with_raw, as_object, read_object

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
NOTHING = -1
"""Place of a line that the trajectory does not have."""
PREFIX_BYTES = 4 << 10
"""Part of a line that has all members before the long one."""
PIECE_BYTES = 1 << 20
"""How much of a line is in memory at once while lines are looked for."""
MAX_LINE_BYTES = 256 << 20
"""Longest line that is read as a whole; a longer line was not written by a server."""
MAX_NUMBER = 1 << 53
MAX_KEYS = 10_000
"""Keys of one episode's requests that are remembered, the newest; a client repeats its latest calls only."""

_CALL_EVENTS = frozenset({"accepted", "call", "reply", "joined"})
_INDEXED_EVENTS = _CALL_EVENTS | {"note"}
_ORIGINS = frozenset({"accepted", "call", "joined"})
"""Lines that have members which a next server needs behind their long one."""
_LONG_MEMBERS = tuple(
    f',"{name}":'.encode() for name in ("arguments", "result", "failure", "error", "text", "prompt", "answer")
)
_EVENT = re.compile(rb'\{"event":"([a-z_]+)"')
_SENT, _FAILED = 1, 2

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
"""Neither NaN nor infinity, which Python's decoder takes."""

log = logging.getLogger("decathlon.observe")


class RequestKeys(msgspec.Struct, frozen=True, omit_defaults=True):
    """By what the client of a request comes back to its call.

    The request's JSON-RPC id is no key: clients use one again.
    """

    operation: str | None = None
    """An id that the client has chosen."""
    session: str | None = None
    """Its MCP session."""
    event_id: str | None = None
    """The number that this server has given the events of the response, `GENERATION.NUMBER`; None if the
    client cannot come back with it."""

    @property
    def texts(self) -> list[str]:
        """The keys, each of which is enough to find the call. An event id counts in its own session only."""
        chosen = [] if self.operation is None else [self.operation]
        if self.session is None or self.event_id is None:
            return chosen
        return [*chosen, f"{self.session}:{self.event_id}"]


class Line(RequestKeys, frozen=True):
    """The short members of a line. All others, which may be megabytes, are skipped."""

    time: _Seconds = 0.0
    seq: _Count = 0
    calls: _Count = 0
    """How many calls precede a note."""
    server: str | None = None
    tool: str | None = None
    name: str = ""
    role: str = ""
    failed: bool = False
    replayed: bool = False
    seconds: _Seconds | None = None
    digest: str | None = None
    """Of the call, or of the offered tools."""


_NO_MEMBERS = Line()
_decode_line = msgspec.json.Decoder(Line).decode


class LoggedKey(NamedTuple):
    """A key of a request, the digest of its call (see `episodes.call`) and its number."""

    key: str
    digest: str
    seq: int


@dataclass(slots=True)
class LoggedCalls:
    """What a server that starts later does with the calls in a trajectory."""

    keys: deque[LoggedKey] = field(default_factory=lambda: deque[LoggedKey](maxlen=MAX_KEYS))
    unanswered: list[JsonObject] = field(default_factory=list[JsonObject])
    """The last lines of the calls without a reply, in the order of their numbers."""


class CallLines(NamedTuple):
    """Both lines of a call that was sent, as they are, and where they begin in the file.

    `reply`: empty, and `reply_at` infinite, if there is none.
    """

    seq: int
    call: bytes
    reply: bytes
    call_at: int
    reply_at: float


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

    def read(self, lines: BinaryIO, whole: Collection[str] = ()) -> Iterator[tuple[str, Line, bytes]]:
        """Add the lines that have not been read yet, and yield each: its event, its members.

        `whole`: events whose lines are read and yielded as a whole.
        """
        for place, size, data in find_lines(lines, self.size_bytes, whole=whole):
            event, line = event_of(data), _NO_MEMBERS
            # Of others they are not needed. They can be long, and labels have any names.
            if event in _INDEXED_EVENTS:
                line = _decoded(data) if event in whole else short_members(data)
            self.size_bytes = place + size
            # No server can have given a number that is much higher.
            if line.seq <= self.lines + MAX_SKIPPED_CALLS:
                self.add(event, place, size, **msgspec.structs.asdict(line))
                yield event, line, data

    def add(self, event: str, place: int, size: int, /, **members: Any) -> None:
        """Add a line of so many bytes at a place. `members`: at least all of `Line` that it has."""
        match event:
            case "call" | "reply" | "accepted" if members["seq"] > 0:
                self._add_call(event, place, **members)
            case "note":
                self.note_calls.append(members["calls"])
                self.notes.append(place)
                self.notes_bytes += size
            case "ready":  # the newest: a set-up may have started over
                self.placed["ready"] = place
            case "start" | "claim":
                self.placed.setdefault(event, place)
            case _:
                pass

    def _add_call(
        self,
        event: str,
        place: int,
        /,
        *,
        seq: int,
        time: float,
        server: str | None = None,
        tool: str | None = None,
        failed: bool = False,
        seconds: float | None = None,
        **_: object,
    ) -> None:
        self.lines += 1
        at = seq - 1
        if (missing := seq - len(self.calls)) > 0:
            self.times.extend([time] * missing)
            self.seconds.extend([math.nan] * missing)
            self.flags.extend(bytes(missing))
            self.replies.extend([NOTHING] * missing)
            self.calls.extend([NOTHING] * missing)
            self.last = seq  # after the tables: readers in other threads go by it
        if event == "reply":
            if self.replies[at] == NOTHING:
                self.count_reply(seq, failed=failed)
            self.replies[at] = place
            self.flags[at] = self.flags[at] & _SENT | (_FAILED if failed else 0)
            self.seconds[at] = self.seconds[at] if seconds is None else seconds
            return
        self.calls[at] = place
        if event == "call" and not self.flags[at] & _SENT:
            self.flags[at] |= _SENT
            self.sent += 1
            self.tools.add((server or "", tool or ""))

    def count_reply(self, seq: int, *, failed: bool) -> None:
        """Count the reply to a call, if it was sent."""
        if seq <= len(self.flags) and self.flags[seq - 1] & _SENT:
            self.answered += 1
            self.failed += failed

    def places(self, seq: int) -> tuple[int, int]:
        """Where a call's line, `call` or `accepted`, and its reply begin; NOTHING for a missing line."""
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
        """Begin a new trajectory, in a new folder that is readable by its owner alone. Raises OSError."""
        self.folder.mkdir(parents=True, mode=0o700)
        try:
            self._out = append_to_regular(self.file, create=True)
        except BaseException:
            with suppress(OSError):
                self.folder.rmdir()
            raise
        return self

    def reopen(self) -> Self:
        """Continue the trajectory of a server that ended; `read_calls` has its calls. Raises OSError.

        A last line that the server did not write completely is removed: what it describes did not happen.
        """
        out = append_to_regular(self.file)
        try:
            self._end = _end_of_lines(self.file)
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
        which may be written later, is a DiskFullError; the refusal of another line is logged.
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
            self.index.add(event, self._end, len(line), time=now, **values)
            self._end += len(line)
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
        logged = LoggedCalls()
        unanswered: dict[int, bytes] = {}
        accepted: set[int] = set()
        for event, line, data in self._read_again():
            if event == "reply":
                unanswered.pop(line.seq, None)
            elif event in ("accepted", "call"):
                unanswered[line.seq] = data
            # The line `call` of a call that was accepted before has the same.
            if line.digest is not None and not (event == "call" and line.seq in accepted):
                logged.keys += [LoggedKey(key, line.digest, line.seq) for key in line.texts]
            if event == "accepted":
                accepted.add(line.seq)
        last_lines = (unanswered[seq] for seq in sorted(unanswered))
        logged.unanswered = [call for data in last_lines if (call := read_object(data))]
        return logged

    def _read_again(self) -> Iterator[tuple[str, Line, bytes]]:
        index = Index()
        with open_regular(self.file) as lines:
            yield from index.read(lines, _ORIGINS)
            with self._lock:  # what was appended meanwhile
                yield from index.read(lines, _ORIGINS)
                self.index = index

    def update(self) -> Self:
        """Find the lines that were written since the last time. Raises OSError."""
        with self._lock, open_regular(self.file) as lines:
            status = os.fstat(lines.fileno())
            if status.st_ino != self.index.inode or status.st_size < self.index.size_bytes:
                self.index = Index()
                self.index.inode = status.st_ino
            deque(self.index.read(lines), maxlen=0)
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


def read_line(lines: BinaryIO, place: int, limit_bytes: int) -> bytes:
    """The line at a place, or its beginning; empty for NOTHING."""
    if place == NOTHING:
        return b""
    lines.seek(place)
    return lines.readline(limit_bytes)


def find_lines(
    lines: BinaryIO, place: int = 0, *, whole: Collection[str] = ()
) -> Iterator[tuple[int, int, bytes]]:
    """The complete lines from a place on: where each begins, its size, and its first PREFIX_BYTES.

    `whole`: events whose lines are read as a whole, up to MAX_LINE_BYTES.
    """
    lines.seek(place)
    while prefix := lines.readline(PREFIX_BYTES):
        size, piece, pieces = len(prefix), prefix, [prefix]
        is_whole = not piece.endswith(b"\n") and event_of(prefix) in whole
        while not piece.endswith(b"\n") and (piece := lines.readline(PIECE_BYTES)):
            size += len(piece)
            if is_whole and size <= MAX_LINE_BYTES:
                pieces.append(piece)
        if not piece.endswith(b"\n"):
            return  # still being written
        yield place, size, b"".join(pieces)
        place += size


def short_members(prefix: bytes) -> Line:
    """The members of a line before its long value; none if they cannot be read."""
    if prefix.endswith(b"\n") and (line := _decoded(prefix)) is not _NO_MEMBERS:
        return line
    if (value := value_start(prefix)) is not None:
        name, start = value
        prefix = prefix[: start - len(name) - 4] + b"}"
    return _decoded(prefix)


def value_start(prefix: bytes) -> tuple[str, int] | None:
    """The name of a line's first long member, and where its value starts; None if there is none."""
    # A quote inside of a string is escaped, so that this is never found in one.
    found = [(at, name) for name in _LONG_MEMBERS if (at := prefix.find(name)) >= 0]
    if not found:
        return None
    at, name = min(found)
    return name[2:-2].decode(), at + len(name)


def event_of(line: bytes) -> str:
    """The kind of a line; empty if it cannot be read."""
    found = _EVENT.match(line)
    return found[1].decode() if found else ""


def _decoded(line: bytes) -> Line:
    """Its members; none if it cannot be read."""
    try:
        return _decode_line(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    try:
        # Lone surrogates, which Python's decoder takes, and which are written as they came.
        return msgspec.convert(as_object(json.loads(line)), Line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _NO_MEMBERS


def _end_of_lines(file: Path) -> int:
    """The size of a file up to the end of its last complete line, in bytes."""
    with open_regular(file) as data:
        if not os.fstat(data.fileno()).st_size:
            return 0
        with mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.rfind(b"\n") + 1
