"""The lines of a trajectory: found one by one in the file, and read as far as they are needed.

A trajectory has up to 256 MiB, and parsing JSON holds the interpreter's lock. So readers find lines by their
places, and of a long line only the members before its long value are decoded. Every bound is for a damaged
file, or one that comes from somewhere else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple, TypeAlias

import msgspec

from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.types import as_object

NOTHING = -1
"""Place of a line that the trajectory does not have."""
PREFIX_BYTES = 4 << 10
"""Part of a line that has all members before the long one."""
PIECE_BYTES = 1 << 20
"""How much of a line is in memory at once while lines are looked for."""
MAX_LINE_BYTES = 256 << 20
"""Longest line that is read as a whole; a longer one was not written by a server."""
MAX_NUMBER = 1 << 53
MAX_KEYS = 10_000
"""Keys of one episode's requests that are remembered, the newest; a client repeats its latest calls only."""
_LONG_MEMBERS = tuple(
    f',"{name}":'.encode() for name in ("arguments", "result", "failure", "error", "text", "prompt", "answer")
)
_EVENT = re.compile(rb'\{"event":"([a-z_]+)"')

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
"""Neither NaN nor infinity, which Python's decoder takes."""


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


class LoggedKey(NamedTuple):
    """A key of a request, the digest of its call (see `episodes.operations`) and its number."""

    key: str
    digest: str
    seq: int


class Line(msgspec.Struct, frozen=True):
    """The short members of a line. All others, which may be megabytes, are skipped."""

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
    operation: str | None = None
    session: str | None = None
    event_id: str | None = None
    digest: str | None = None

    @property
    def keys(self) -> list[str]:
        return RequestKeys(self.operation, self.session, self.event_id).texts


NO_MEMBERS = Line()
_decode_line = msgspec.json.Decoder(Line).decode


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
    if prefix.endswith(b"\n") and (line := decoded(prefix)) is not NO_MEMBERS:
        return line
    if (value := value_start(prefix)) is not None:
        name, start = value
        prefix = prefix[: start - len(name) - 4] + b"}"
    return decoded(prefix)


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


def decoded(line: bytes) -> Line:
    """Its members; none if it cannot be read."""
    try:
        return _decode_line(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    try:
        # Lone surrogates, which Python's decoder takes, and which are written as they came.
        return msgspec.convert(as_object(json.loads(line)), Line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return NO_MEMBERS


def end_of_lines(file: Path) -> int:
    """The size of a file up to the end of its last complete line, in bytes."""
    with open_regular(file) as data:
        end = data.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - PIECE_BYTES)
            data.seek(start)
            if (found := data.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0
