"""Where the lines of a trajectory are, and what they say, without parsing long ones.

A trajectory has up to 256 MiB, and parsing JSON holds the interpreter's lock. So lines are read by position,
and of a line longer than JSON_BYTES only the members before its long value are decoded; the value is a slice.
"""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Annotated, BinaryIO, Literal, NamedTuple, Self, TypeAlias

import msgspec

from decathlon_mcp.plugins.history.values import CallEntry, CallTime, Entry, NoteEntry, Text
from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.types import JsonObject, as_object, read_object

JSON_BYTES = 64 << 10
"""Longest JSON text that is parsed, and longest part of a value that an entry has."""
PREFIX_BYTES = 4 << 10
"""Part of a line that has all members before the long one."""
PIECE_BYTES = 1 << 20
"""How much of a line is in memory at once while lines are looked for."""
MAX_SKIPPED_CALLS = 100_000
"""Numbers without a line in a trajectory: damaged lines must not make the tables as long as they like."""
MAX_NUMBER = 1 << 53
NOTHING = -1
_LONG_MEMBERS = tuple(
    f',"{name}":'.encode() for name in ("arguments", "result", "failure", "error", "text", "prompt", "answer")
)
_REPLIES: Mapping[str, Literal["result", "error", "failure"]] = {
    "result": "result",
    "error": "error",
    "failure": "failure",
}


_EVENT = re.compile(rb'\{"event":"([a-z_]+)"')
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
"""Neither NaN nor infinity, which Python's decoder takes."""


class _Line(msgspec.Struct, frozen=True):
    """The short members of a line."""

    event: str = ""
    time: _Seconds = 0.0
    seq: _Count = 0
    calls: _Count = 0
    server: str | None = None
    tool: str | None = None
    name: str = ""
    role: str = ""
    failed: bool = False
    replayed: bool = False
    seconds: _Seconds | None = None


class _Arguments(msgspec.Struct, frozen=True):
    """The arguments of a call, as they were written."""

    arguments: msgspec.Raw = msgspec.Raw(b"null")


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_arguments = msgspec.json.Decoder(_Arguments).decode


class Span(NamedTuple):
    """Where a line is, without its line feed, in bytes."""

    start: int
    size: int


class _Spans:
    """Places of lines by number, from 1."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._sizes = array("q")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Span | None:
        if not 1 <= number <= len(self) or self._starts[number - 1] == NOTHING:
            return None
        return Span(self._starts[number - 1], self._sizes[number - 1])

    def set(self, number: int, span: Span) -> None:
        missing = number - len(self)
        self._starts.extend([NOTHING] * missing)
        self._sizes.extend([0] * missing)
        self._starts[number - 1], self._sizes[number - 1] = span


@dataclass(slots=True)
class TrajectoryIndex:
    """Where the lines of a trajectory are. `size_bytes`: how much of the file was read."""

    file: Path
    size_bytes: int = 0
    inode: int = 0
    head: Span | None = None
    ready: Span | None = None
    claim: Span | None = None
    calls: _Spans = field(default_factory=_Spans)
    replies: _Spans = field(default_factory=_Spans)
    notes: _Spans = field(default_factory=_Spans)
    _note_calls: array[int] = field(default_factory=lambda: array("q"))
    _times: array[float] = field(default_factory=lambda: array("d"))
    _seconds: array[float] = field(default_factory=lambda: array("d"))
    _failed: bytearray = field(default_factory=bytearray)
    _lines: int = 0
    lock: Lock = field(default_factory=Lock)

    def update(self) -> Self:
        """Read what was written since the last time. Raises OSError."""
        with self.lock, open_regular(self.file) as lines:
            status = os.fstat(lines.fileno())
            if status.st_ino != self.inode or status.st_size < self.size_bytes:
                self._clear(status.st_ino)
            lines.seek(self.size_bytes)
            for span, prefix in _prefixes(lines, self.size_bytes):
                self._add(span, prefix)
                self.size_bytes = span.start + span.size + 1
        return self

    def notes_before(self, first: int, last: int) -> Iterator[int]:
        """Numbers of the notes that stand before the calls with these numbers."""
        for number, calls in enumerate(self._note_calls, 1):
            if first <= calls + 1 <= last:
                yield number

    def calls_before(self, note: int) -> int:
        """How many calls were before a note."""
        return self._note_calls[note - 1]

    def failed(self, seq: int) -> bool:
        return bool(self._failed[seq - 1])

    def call_times(self) -> list[CallTime]:
        """See `EpisodeHistory.call_times`."""
        with self.lock:  # another thread may be adding a call
            calls = list(zip(self._times, self._seconds, self._failed, strict=True))
        first = min((time for time, _, _ in calls), default=0.0)
        return [
            CallTime(seq, time - first, None if math.isnan(seconds) else seconds, bool(failed))
            for seq, (time, seconds, failed) in enumerate(calls, 1)
        ]

    def _clear(self, inode: int) -> None:
        self.size_bytes, self.inode = 0, inode
        self.head = self.ready = self.claim = None
        self.calls, self.replies, self.notes = _Spans(), _Spans(), _Spans()
        self._note_calls, self._times, self._seconds = array("q"), array("d"), array("d")
        self._failed = bytearray()
        self._lines = 0

    def _add(self, span: Span, prefix: bytes) -> None:
        event = _EVENT.match(prefix)
        match event and event[1]:
            # Their members are not needed here. They can be long, and labels have any names.
            case b"start":
                self.head = self.head or span
            case b"ready":
                self.ready = span
            case b"claim":
                self.claim = span
            case b"note":
                self.notes.set(len(self.notes) + 1, span)
                self._note_calls.append(_short_members(prefix).calls)
            case b"accepted" | b"call" | b"reply":
                line = _short_members(prefix)
                if 0 < line.seq <= self._lines + MAX_SKIPPED_CALLS:
                    self._lines += 1
                    self._add_call(line, span)
            case _:
                pass

    def _add_call(self, line: _Line, span: Span) -> None:
        missing = line.seq - len(self._times)
        self._times.extend([line.time] * missing)
        self._seconds.extend([math.nan] * missing)
        self._failed.extend(bytes(max(0, missing)))
        if line.event != "reply":
            self.calls.set(line.seq, span)
            return
        self.replies.set(line.seq, span)
        self._seconds[line.seq - 1] = math.nan if line.seconds is None else line.seconds
        self._failed[line.seq - 1] = line.failed


def _prefixes(lines: BinaryIO, position: int) -> Iterator[tuple[Span, bytes]]:
    """The complete lines from a position on: where each is, and its beginning."""
    while prefix := lines.readline(PREFIX_BYTES):
        size, piece = len(prefix), prefix
        while not piece.endswith(b"\n") and (piece := lines.readline(PIECE_BYTES)):
            size += len(piece)
        if not piece.endswith(b"\n"):
            return  # still being written
        yield Span(position, size - 1), prefix
        position += size


def _value_start(prefix: bytes) -> tuple[str, int] | None:
    """The name of a line's first long member, and where its value starts; None if there is none."""
    # A quote inside of a string is escaped, so that this is never found in one.
    found = [(at, name) for name in _LONG_MEMBERS if (at := prefix.find(name)) >= 0]
    if not found:
        return None
    at, name = min(found)
    return name[2:-2].decode(), at + len(name)


def _short_members(prefix: bytes) -> _Line:
    """The members of a line before its long value; an empty line if they cannot be read."""
    value = _value_start(prefix)
    if value is not None:
        name, start = value
        prefix = prefix[: start - len(name) - 4] + b"}"
    try:
        return _decode_line(prefix)
    except (msgspec.MsgspecError, ValueError):
        pass
    # msgspec refuses the escapes of lone surrogates, which the journal writes as they came.
    try:
        return msgspec.convert(json.loads(prefix), _Line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _Line()


class TrajectoryReader:
    """Reads lines of an indexed trajectory. A context manager; methods raise OSError."""

    def __init__(self, index: TrajectoryIndex) -> None:
        self._index = index
        self._file = open_regular(index.file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def line(self, span: Span | None) -> JsonObject | None:
        """A short line as JSON; None for one above JSON_BYTES, or if there is none."""
        if span is None or span.size > JSON_BYTES:
            return None
        return read_object(self._read(span.start, span.size))

    def value(self, span: Span, *, limit: int = JSON_BYTES) -> Text | None:
        """The beginning of a line's long value, up to the end of the line."""
        place = self.value_span(span)
        return None if place is None else self._text(place, limit)

    def value_span(self, span: Span) -> Span | None:
        """Where the long value of a line is. Other members may follow it in a line `call`."""
        value = _value_start(self._read(span.start, min(span.size, PREFIX_BYTES)))
        if value is None:
            return None
        return Span(span.start + value[1], span.size - value[1] - 1)

    def entries(self, first: int, last: int, *, limit: int = JSON_BYTES) -> Iterator[Entry]:
        """See `EpisodeHistory.calls`. Values above `limit` bytes are cut."""
        index = self._index
        end = len(index.calls)
        # Notes after the last call come with it.
        notes = sorted(
            index.notes_before(first, last if last < end else max(last, end) + 1),
            key=index.calls_before,
        )
        waiting = iter(notes)
        note = next(waiting, None)
        for seq in range(max(1, first), min(last, end) + 1):
            while note is not None and index.calls_before(note) < seq:
                yield self._note(note)
                note = next(waiting, None)
            if (call := self._call(seq, limit)) is not None:
                yield call
        while note is not None:
            yield self._note(note)
            note = next(waiting, None)

    def find(self, text: str, after: int, *, failed_only: bool) -> int | None:
        """See `EpisodeHistory.find`."""
        index, needles = self._index, _needles(text)
        for seq in range(max(0, after) + 1, len(index.calls) + 1):
            if failed_only and not index.failed(seq):
                continue
            if not text:
                return seq
            if (span := index.calls[seq]) is None:
                continue
            name = _short_members(self._read(span.start, min(span.size, PREFIX_BYTES))).name
            if text.lower() in name.lower() or self._has(self.value_span(span), needles):
                return seq
            if (reply := index.replies[seq]) is not None and self._has(self.value_span(reply), needles):
                return seq
        return None

    def note(self, number: int) -> NoteEntry | None:
        """See `EpisodeHistory.note`."""
        return self._note(number) if 1 <= number <= len(self._index.notes) else None

    def chunks(self, span: Span) -> Iterator[bytes]:
        """Part of the file, in chunks of JSON_BYTES."""
        end = span.start + span.size
        for start in range(span.start, end, JSON_BYTES):
            yield self._read(start, min(JSON_BYTES, end - start))

    def _call(self, seq: int, limit: int) -> CallEntry | None:
        span = self._index.calls[seq]
        if span is None:
            return None
        prefix = self._read(span.start, min(span.size, PREFIX_BYTES))
        line, arguments = _short_members(prefix), None
        if span.size <= limit:
            arguments = _arguments(self._read(span.start, span.size))
        elif (place := self.value_span(span)) is not None:
            arguments = self._text(place, limit)
        reply, reply_line, kind = self._index.replies[seq], _Line(), None
        if reply is not None:
            start = self._read(reply.start, min(reply.size, PREFIX_BYTES))
            reply_line, value = _short_members(start), _value_start(start)
            kind = None if value is None else _REPLIES.get(value[0])
        return CallEntry(
            seq=seq,
            name=line.name,
            server=line.server,
            tool=line.tool,
            time=line.time,
            seconds=reply_line.seconds,
            failed=reply_line.failed,
            replayed=line.replayed,
            arguments=arguments,
            reply=None if reply is None or kind is None else self.value(reply, limit=limit),
            reply_kind=kind,
        )

    def _note(self, number: int) -> NoteEntry:
        span = self._index.notes[number]
        assert span is not None, "notes are numbered without gaps"
        value = self.line(span)
        prefix = _short_members(self._read(span.start, min(span.size, PREFIX_BYTES)))
        text, usage = self.value(span), dict[str, int]()
        if value is not None:
            whole = str(value.get("text", ""))
            text = Text(whole, truncated=False, size_bytes=len(whole.encode("utf-8", "surrogatepass")))
            counts = as_object(value.get("usage")) or {}
            usage = {name: count for name, count in counts.items() if type(count) is int}
        return NoteEntry(
            number=number,
            calls=prefix.calls,
            time=prefix.time,
            role=prefix.role,
            text=text or Text("", truncated=False, size_bytes=0),
            usage=usage,
        )

    def _has(self, span: Span | None, needles: list[bytes]) -> bool:
        """Whether part of the file has one of these texts; case does not matter for ASCII."""
        if span is None:
            return False
        overlap = max(map(len, needles)) - 1
        end, start = span.start + span.size, span.start
        while start < end:
            piece = self._read(start, min(PIECE_BYTES + overlap, end - start)).lower()
            if any(needle in piece for needle in needles):
                return True
            start += PIECE_BYTES
        return False

    def _text(self, span: Span, limit: int) -> Text:
        truncated = span.size > limit
        data = self._read(span.start, min(span.size, limit))
        # A cut may be inside of a character.
        text = data.decode("utf-8", "ignore" if truncated else "replace")
        return Text(text, truncated, span.size)

    def _read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


def _arguments(line: bytes) -> Text | None:
    try:
        data = bytes(_decode_arguments(line).arguments)
    except (msgspec.MsgspecError, ValueError):
        # As in `_short_members`.
        try:
            arguments = (as_object(json.loads(line)) or {}).get("arguments")
            data = json.dumps(arguments, separators=(",", ":")).encode()
        except (ValueError, RecursionError):
            return None
    text = Text(data.decode("utf-8", "replace"), truncated=False, size_bytes=len(data))
    return None if data == b"null" else text


def _needles(text: str) -> list[bytes]:
    """The ways in which a text can be written in JSON, also in a JSON text that is a string of it."""
    once, ascii_once = json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]
    twice = json.dumps(once, ensure_ascii=False)[1:-1]
    found = {once, ascii_once, twice}
    return [needle.encode("utf-8", "surrogatepass").lower() for needle in found]
