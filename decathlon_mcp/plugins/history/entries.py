"""The calls and notes of a trajectory for people: texts that are cut, and lines that are looked for.

Of a line longer than JSON_BYTES only the members before its long value are decoded; the value is a slice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Self, cast

import msgspec

from decathlon_mcp.plugins.history.values import CallEntry, CallTime, Entry, NoteEntry, ReplyKind, Text
from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.storage.trajectory import (
    NOTHING,
    PIECE_BYTES,
    PREFIX_BYTES,
    Index,
    Line,
    Trajectory,
    read_line,
    short_members,
    value_start,
)
from decathlon_mcp.types import JsonObject, as_object, read_object

JSON_BYTES = 64 << 10
"""Longest JSON text that is parsed, and longest part of a value that an entry has."""
MAX_USAGE = 1e15
"""Greatest number of a note that counts; a server accepts less."""
_REPLIES = frozenset({"result", "error", "failure"})


class _Arguments(msgspec.Struct, frozen=True):
    """The arguments of a call, as they were written."""

    arguments: msgspec.Raw = msgspec.Raw(b"null")


_decode_arguments = msgspec.json.Decoder(_Arguments).decode


class EntryReader:
    """Reads entries of a trajectory that is up to date; None is an empty one.

    A context manager; methods raise OSError.
    """

    def __init__(self, trajectory: Trajectory | None) -> None:
        self.index = Index() if trajectory is None else trajectory.index
        self._path = Path() if trajectory is None else trajectory.file
        self._file: BinaryIO = BytesIO() if trajectory is None else open_regular(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def placed(self, event: str) -> JsonObject | None:
        """The line `start`, `ready` or `claim`; None for one above JSON_BYTES, or if there is none."""
        return self.line(self.index.placed.get(event, NOTHING))

    def placed_value(self, event: str) -> Text | None:
        """The beginning of the long value of such a line."""
        return self.value(self.index.placed.get(event, NOTHING))

    def line(self, place: int) -> JsonObject | None:
        """A short line as JSON; None for one above JSON_BYTES, or if there is none."""
        line = self._read(place, JSON_BYTES + 1)
        return read_object(line) if line.endswith(b"\n") else None

    def value(self, place: int, *, limit: int = JSON_BYTES) -> Text | None:
        """The beginning of a line's long value, up to the end of the line."""
        start = self._value_start(place)
        return None if start is None else self._text(start, limit)

    def value_chunks(self, place: int) -> Iterator[bytes] | None:
        """A line's long value in chunks, if it is the line's last member; None if there is none."""
        start = self._value_start(place)
        return None if start is None else _chunks(self._path, start)

    def entries(self, first: int, last: int, *, limit: int = JSON_BYTES) -> Iterator[Entry]:
        """See `EpisodeHistory.calls`. Values above `limit` bytes are cut."""
        end = self.index.last
        # Notes after the last call come with it.
        end_of_notes = last if last < end else max(last, end) + 1
        counts = enumerate(self.index.note_calls, 1)
        waiting = iter(
            sorted((count, number) for number, count in counts if first <= count + 1 <= end_of_notes)
        )
        note = next(waiting, None)
        for seq in range(max(1, first), min(last, end) + 1):
            while note is not None and note[0] < seq:
                yield self._note(note[1])
                note = next(waiting, None)
            if (call := self._call(seq, limit)) is not None:
                yield call
        while note is not None:
            yield self._note(note[1])
            note = next(waiting, None)

    def find(self, text: str, after: int, *, failed_only: bool) -> int | None:
        """See `EpisodeHistory.find`."""
        index, needles = self.index, _needles(text)
        for seq in range(max(0, after) + 1, index.last + 1):
            if failed_only and not index.has_failed(seq):
                continue
            if not text:
                return seq
            call, reply = index.places(seq)
            if call == NOTHING:
                continue
            name = short_members(self._read(call, PREFIX_BYTES)).name
            if text.lower() in name.lower() or any(self._has(place, needles) for place in (call, reply)):
                return seq
        return None

    def call_times(self) -> list[CallTime]:
        """See `EpisodeHistory.call_times`."""
        index = self.index
        first = min(index.times, default=0.0)
        return [
            CallTime(seq, time - first, None if math.isnan(seconds) else seconds, index.has_failed(seq))
            for seq, (time, seconds) in enumerate(zip(index.times, index.seconds, strict=False), 1)
        ]

    def note(self, number: int) -> NoteEntry | None:
        """See `EpisodeHistory.note`."""
        return self._note(number) if 1 <= number <= len(self.index.notes) else None

    def _call(self, seq: int, limit: int) -> CallEntry | None:
        place, reply_place = self.index.places(seq)
        if place == NOTHING:
            return None
        data = self._read(place, max(limit + 1, PREFIX_BYTES))
        line = short_members(data if len(data) <= PREFIX_BYTES else data[:PREFIX_BYTES])
        is_whole = len(data) <= limit + 1 and data.endswith(b"\n")
        arguments = _arguments(data) if is_whole else self.value(place, limit=limit)
        prefix = self._read(reply_place, PREFIX_BYTES)
        reply = short_members(prefix) if prefix else Line()
        value = value_start(prefix)
        kind = cast("ReplyKind", value[0]) if value is not None and value[0] in _REPLIES else None
        return CallEntry(
            seq=seq,
            name=line.name,
            server=line.server,
            tool=line.tool,
            time=line.time,
            seconds=reply.seconds,
            failed=reply.failed,
            replayed=line.replayed,
            arguments=arguments,
            reply=None if kind is None else self.value(reply_place, limit=limit),
            reply_kind=kind,
        )

    def _note(self, number: int) -> NoteEntry:
        place, calls = self.index.notes[number - 1], self.index.note_calls[number - 1]
        value = self.line(place)
        prefix = short_members(self._read(place, PREFIX_BYTES))
        text = self.value(place) if value is None else Text.whole(str(value.get("text", "")))
        counts = as_object((value or {}).get("usage")) or {}
        return NoteEntry(
            number=number,
            calls=calls,
            time=prefix.time,
            role=prefix.role,
            text=text or Text.whole(""),
            usage={
                name: count
                for name, count in counts.items()
                if type(count) in (int, float) and 0 <= count <= MAX_USAGE
            },
        )

    def _value_start(self, place: int) -> int | None:
        value = value_start(self._read(place, PREFIX_BYTES))
        return None if value is None else place + value[1]

    def _has(self, place: int, needles: list[bytes]) -> bool:
        """Whether a line's long value has one of these texts; case does not matter for ASCII."""
        if (start := self._value_start(place)) is None:
            return False
        overlap = max(map(len, needles)) - 1
        self._file.seek(start)
        end = b""
        while piece := self._file.readline(PIECE_BYTES):
            data = (end + piece).lower()
            if any(needle in data for needle in needles):
                return True
            if piece.endswith(b"\n"):
                return False
            end = data[len(data) - overlap :]
        return False

    def _text(self, start: int, limit: int) -> Text:
        data = self._read(start, limit + 2)
        size = len(data) - 2
        if truncated := not data.endswith(b"}\n"):
            while not data.endswith(b"\n") and (piece := self._file.readline(PIECE_BYTES)):
                size, data = size + len(piece), data[:limit] + piece[-1:]
        text = data[: min(size, limit)].decode("utf-8", "ignore" if truncated else "replace")
        # A cut may be inside of a character.
        return Text(text, truncated, size)

    def _read(self, place: int, limit_bytes: int) -> bytes:
        return read_line(self._file, place, limit_bytes)


def _chunks(path: Path, start: int) -> Iterator[bytes]:
    """A value and what stands behind it in its line, without the line's own end."""
    with open_regular(path) as file:
        file.seek(start)
        held = b""
        while piece := file.readline(JSON_BYTES):
            data = held + piece
            if piece.endswith(b"\n"):
                yield data[:-2]
                return
            data, held = data[:-1], data[-1:]
            yield data


def _arguments(line: bytes) -> Text | None:
    try:
        data = bytes(_decode_arguments(line).arguments)
    except (msgspec.MsgspecError, ValueError):
        # msgspec refuses the escapes of lone surrogates, which are written as they came.
        try:
            arguments = (as_object(json.loads(line)) or {}).get("arguments")
            data = json.dumps(arguments, separators=(",", ":")).encode()
        except (ValueError, RecursionError):
            return None
    return None if data == b"null" else Text.whole(data.decode("utf-8", "replace"))


def _needles(text: str) -> list[bytes]:
    """The ways in which a text can be written in JSON, also in a JSON text that is a string of it."""
    once, ascii_once = json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]
    twice = json.dumps(once, ensure_ascii=False)[1:-1]
    found = {once, ascii_once, twice}
    return [needle.encode("utf-8", "surrogatepass").lower() for needle in found]
