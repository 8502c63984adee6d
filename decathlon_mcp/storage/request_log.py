"""The requests of sessions whose answers are not out yet, in a file of the server that serves them.

A request is one write to the end of the file, before it is served; the database would need ten. A record is
one line of JSON, an array whose first item is its kind:

- `["+", SESSION, REQUEST, SENT_AT, BYTES]`, followed by a body of that many bytes and a line feed;
- `["a", [[SESSION, REQUEST], ...]]`: their answers were written;
- `["-", [[SESSION, REQUEST], ...]]`: they are not needed any more;
- `["s", SESSION]`: no request of the session is.

The positions of the bodies that are needed are in memory. The file is written again without the others
whenever it has grown to several times what is needed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Generator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from decathlon_mcp.storage.disk import write_all
from decathlon_mcp.telemetry.logs import fields

FOLDER = "requests"
"""Name of the folder in the state folder that has a file for each server."""
MIN_REWRITE_BYTES = 16 << 20
REWRITE_FACTOR = 4
"""The file is written again when it has REWRITE_FACTOR times the bytes needed and MIN_REWRITE_BYTES more."""

_log = logging.getLogger("decathlon.storage")
_encode = msgspec.json.Encoder().encode


class RequestRow(msgspec.Struct, frozen=True):
    """A request of a session whose answer is not out yet. `request`: its JSON-RPC id as JSON.

    `message`: the request's body. `answered`: the answer was written, but may not have arrived.
    """

    session: str
    request: str
    message: bytes
    answered: bool = False


class _Entry(msgspec.Struct):
    """Where a request's body is in the file."""

    offset: int
    size_bytes: int
    sent_at: float
    answered: bool = False


class RequestLog:
    """The requests of one server. Creating it raises OSError; later a disk that fails costs requests."""

    def __init__(self, state: Path, server: str) -> None:
        self._folder = state / FOLDER
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._file = self._folder / f"{server}.log"
        self._descriptor = os.open(self._file, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size_bytes = os.fstat(self._descriptor).st_size
        self._rewrite_at_bytes = MIN_REWRITE_BYTES
        self._needed_bytes = 0
        self._sessions: dict[str, dict[str, _Entry]] = {}
        # Of an earlier server with this name. Their records are appended once more.
        for sent_at, row in _read_log(self._file.read_bytes()):
            self._insert(row, sent_at)

    def insert(self, row: RequestRow) -> None:
        """Keep a request, or replace the one with the same id."""
        self._insert(row, time.time())

    def mark_answered(self, requests: Iterable[tuple[str, str]]) -> None:
        """Note that the answers of these requests, pairs of a session and a request's id, were written."""
        marked: list[tuple[str, str]] = []
        for session, request in requests:
            if (entry := self._sessions.get(session, {}).get(request)) is not None:
                entry.answered = True
                marked.append((session, request))
        if marked:
            self._append(_encode(["a", marked]) + b"\n")

    def forget(self, requests: Iterable[tuple[str, str]]) -> None:
        """Drop requests, given as for `mark_answered`."""
        known = [(session, request) for session, request in requests if self._drop(session, request)]
        if known:
            self._append(_encode(["-", known]) + b"\n")

    def forget_session(self, session: str) -> None:
        """Drop all requests of a session."""
        if requests := self._sessions.get(session):
            for request in tuple(requests):
                self._drop(session, request)
            self._append(_encode(["s", session]) + b"\n")

    def rows(self, session: str) -> list[RequestRow]:
        """The requests of a session, oldest first. Those that cannot be read are skipped."""
        entries = sorted(self._sessions.get(session, {}).items(), key=lambda item: item[1].sent_at)
        rows: list[RequestRow] = []
        for request, entry in entries:
            body = self._read(entry)
            if body is not None:
                rows.append(RequestRow(session, request, body, entry.answered))
        return rows

    def adopt(self, servers: Collection[str]) -> None:
        """Take the requests of servers that are dead. Blocks."""
        for server in servers:
            file = self._folder / f"{server}.log"
            if file == self._file or not file.is_file():
                continue
            try:
                for sent_at, row in _read_log(file.read_bytes()):
                    self._insert(row, sent_at)
                file.unlink()
            except OSError as error:
                _log.warning("requests of a dead server are lost", extra=fields(why=error.strerror))

    def delete(self, server: str) -> None:
        """Delete the requests of a server that is dead."""
        (self._folder / f"{server}.log").unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, which stays if the next server needs a request."""
        os.close(self._descriptor)
        if not self._sessions:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _insert(self, row: RequestRow, sent_at: float) -> None:
        self._drop(row.session, row.request)
        header = _encode(["+", row.session, row.request, sent_at, len(row.message)]) + b"\n"
        offset = self._append(header + row.message + b"\n")
        if offset is not None:
            entry = _Entry(offset + len(header), len(row.message), sent_at)
            self._sessions.setdefault(row.session, {})[row.request] = entry
            self._needed_bytes += entry.size_bytes
            if row.answered:
                self.mark_answered([(row.session, row.request)])

    def _drop(self, session: str, request: str) -> bool:
        requests = self._sessions.get(session)
        if requests is None or (entry := requests.pop(request, None)) is None:
            return False
        self._needed_bytes -= entry.size_bytes
        if not requests:
            del self._sessions[session]
        return True

    def _append(self, record: bytes) -> int | None:
        """Write a record to the end of the file; returns its position, None if the disk refused it."""
        if self._size_bytes > self._rewrite_at_bytes:
            self._rewrite()
        offset = self._size_bytes
        try:
            write_all(self._descriptor, record)
        except OSError as error:
            # Not tried again: a request may be long.
            _log.error("a request could not be stored", extra=fields(why=error.strerror))
            with suppress(OSError):
                os.ftruncate(self._descriptor, offset)
            return None
        self._size_bytes += len(record)
        return offset

    def _read(self, entry: _Entry) -> bytes | None:
        try:
            body = os.pread(self._descriptor, entry.size_bytes, entry.offset)
        except OSError as error:
            _log.warning("a stored request cannot be read", extra=fields(why=error.strerror))
            return None
        return body if len(body) == entry.size_bytes else None

    def _rewrite(self) -> None:
        """Write the file again with the requests that are needed."""
        self._rewrite_at_bytes = REWRITE_FACTOR * self._needed_bytes + MIN_REWRITE_BYTES
        if self._size_bytes <= self._rewrite_at_bytes:
            return
        partial = self._file.with_suffix(".partial")
        flags = os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        sessions: dict[str, dict[str, _Entry]] = {}
        size_bytes = 0
        try:
            descriptor = os.open(partial, flags, 0o600)
            try:
                for session, requests in self._sessions.items():
                    for request, entry in requests.items():
                        body = self._read(entry)
                        if body is None:
                            continue
                        header = _encode(["+", session, request, entry.sent_at, len(body)]) + b"\n"
                        mark = _encode(["a", [[session, request]]]) + b"\n" if entry.answered else b""
                        write_all(descriptor, header + body + b"\n" + mark)
                        moved = _Entry(size_bytes + len(header), len(body), entry.sent_at, entry.answered)
                        sessions.setdefault(session, {})[request] = moved
                        size_bytes += len(header) + len(body) + 1 + len(mark)
                os.replace(partial, self._file)  # noqa: PTH105  (documented as atomic)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            self._rewrite_at_bytes = 2 * self._size_bytes
            _log.warning("the log of requests could not be shortened", extra=fields(why=error.strerror))
            partial.unlink(missing_ok=True)
            return
        os.close(self._descriptor)
        self._descriptor, self._size_bytes, self._sessions = descriptor, size_bytes, sessions
        self._needed_bytes = sum(
            entry.size_bytes for requests in sessions.values() for entry in requests.values()
        )


def _read_log(data: bytes) -> list[tuple[float, RequestRow]]:
    """The requests in a log that are needed, with their times. A record that is cut ends it."""
    known: dict[tuple[str, str], tuple[float, RequestRow]] = {}
    for kind, *values in _records(data):
        try:
            if kind == "+":
                session, request, sent_at, body = values
                known[session, request] = float(sent_at), RequestRow(session, request, body)
            elif kind == "s":
                known = {key: value for key, value in known.items() if key[0] != values[0]}
            else:
                for session, request in values[0]:
                    if kind == "-":
                        known.pop((session, request), None)
                    elif (found := known.get((session, request))) is not None:
                        sent_at, row = found
                        known[session, request] = sent_at, msgspec.structs.replace(row, answered=True)
        except (TypeError, ValueError):
            break  # the file is damaged
    return list(known.values())


def _records(data: bytes) -> Generator[list[Any]]:
    """The records of a log; in those of kind `+`, the body instead of its length."""
    position = 0
    while (end := data.find(b"\n", position)) >= 0:
        try:
            record = msgspec.json.decode(data[position:end], type=list[Any])
        except (msgspec.MsgspecError, ValueError):
            return
        position = end + 1
        if record and record[0] == "+":
            size_bytes = record[-1]
            if not isinstance(size_bytes, int) or size_bytes < 0:
                return
            body = data[position : position + size_bytes]
            if len(body) < size_bytes:
                return
            record[-1] = body
            position += size_bytes + 1
        if not record:
            return
        yield record
