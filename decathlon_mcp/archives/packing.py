"""Moves through folders of a sandbox, whose processes may have filled them with anything, and packs them.

`FolderCursor` moves by descriptors, so that no link is ever followed. Packing has named limits.
The walk keeps one folder's listing open and reads it entry by entry; it never has a list of names. What it
keeps is counted in bytes before it is kept:

    names of folders that are still to be entered     `MAX_PENDING_BYTES`      8 MiB
    first names of files with several names           `MAX_FIRST_NAME_BYTES`  24 MiB
    the path of the present folder, and its cursor    `MAX_LEVELS` names      <1 MiB
    bytes on their way to the archive                 two chunks              <1 MiB

So one walk has at most 34 MiB, whatever is in the folder, and all walks of a server have that many times the
number of captures at once (32 with `--max-opening 4`: 1.1 GiB, if every one of them is such an attack).
Entries, bytes of names and seconds are counted as they arrive, so that each walk also ends.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from decathlon_sandbox import archives
from msgspec.structs import replace

from decathlon_mcp.archives.reading import BLOCK_BYTES, Kind, extends_next, header_size
from decathlon_mcp.archives.writing import (
    OPEN_FLAGS,
    Entry,
    archive_chunks,
    empty_archive,
    encoded,
    file_chunks,
    header_of,
    save,
)
from decathlon_mcp.errors import BadRequestError, LimitExceededError

MAX_LEVELS = 1000
"""How deep folders may lie: each of those above may have to be opened for a move from one to another."""
MAX_ENTRIES = 500_000
"""Everything below a folder, sockets and devices included: twice what a grader takes."""
MAX_NAME_BYTES = 64 << 20
"""Names of all entries, without the folders above them: 128 bytes for each of `MAX_ENTRIES`."""
MAX_PENDING_BYTES = 8 << 20
MAX_FIRST_NAME_BYTES = 24 << 20
"""Files whose first names need more are packed once for each name."""
MAX_SECONDS = 60.0
"""CPU time of a walk's thread, which other work on the machine hardly prolongs. `MAX_ENTRIES` need some 15 s
at `MAX_LEVELS`."""

_FIRST_NAME_COST = 200
"""Bytes that a remembered name takes besides itself."""
_ENTRIES_PER_LOOK = 64
_FAULTS_OF_THE_MACHINE = frozenset({errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of reading that no state of the files explains."""
_T = TypeVar("_T")

Parts = tuple[str, ...]


class FolderCursor(archives.FolderCursor):
    """A cursor that goes at most `MAX_LEVELS` folders down."""

    def second(self) -> FolderCursor:
        """A cursor that moves independently below the same folder, which must exist; it creates none."""
        return FolderCursor(self._base)

    def enter(self, parts: tuple[str | bytes, ...]) -> int:
        """See the base class. Raises OSError, LimitExceededError, and BadRequestError for ".."."""
        if len(parts) > MAX_LEVELS:
            raise LimitExceededError(
                f"folders in the sandbox are more than {MAX_LEVELS} levels deep", budget="levels"
            )
        try:
            return super().enter(parts)
        except ValueError as error:
            raise BadRequestError(str(error)) from None


class PackBudget:
    """Counts what is packed. Every method raises LimitExceededError, whose `budget` names the limit."""

    def __init__(self) -> None:
        self._entries = 0
        self._name_bytes = 0
        self._pending_bytes = 0
        # The walk runs in one thread, from which the first entry is asked for.
        self._started = time.thread_time()

    def count(self, name: bytes = b"") -> None:
        """Count one entry."""
        self._entries += 1
        self._name_bytes += len(name)
        if self._entries > MAX_ENTRIES:
            raise _exceeded("entries", MAX_ENTRIES, "files and folders")
        if self._name_bytes > MAX_NAME_BYTES:
            raise _exceeded("name_bytes", MAX_NAME_BYTES, "bytes of names")
        if self._entries % _ENTRIES_PER_LOOK == 0:
            self.look_at_time()

    def look_at_time(self) -> None:
        if time.thread_time() - self._started > MAX_SECONDS:
            raise _exceeded("seconds", MAX_SECONDS, "seconds of CPU time to read")

    def keep(self, name_bytes: int) -> None:
        """Count the name of a folder that is entered later; a negative number once it was."""
        self._pending_bytes += name_bytes
        if self._pending_bytes > MAX_PENDING_BYTES:
            raise _exceeded(
                "pending_bytes", MAX_PENDING_BYTES, "bytes of names of folders next to each other"
            )


def _exceeded(budget: str, limit: float, what: str) -> LimitExceededError:
    return LimitExceededError(
        f"the files in the sandbox exceed the limit of {limit:g} {what}", budget=budget, limit=limit
    )


def counted(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks of a plain tar that somebody else packs. Raises LimitExceededError past `MAX_ENTRIES`."""
    budget, header, skip = PackBudget(), bytearray(), 0
    for chunk in chunks:
        position = 0
        while position < len(chunk):
            if skip:
                step = min(skip, len(chunk) - position)
                skip -= step
                position += step
                continue
            part = chunk[position : position + BLOCK_BYTES - len(header)]
            header += part
            position += len(part)
            if len(header) == BLOCK_BYTES:
                if any(header) and not extends_next(header):
                    budget.count()
                skip = header_size(header)
                skip += -skip % BLOCK_BYTES
                header.clear()
        yield chunk


def pack_folder(folder: Path, archive: Path, limit_bytes: int, *, below: Path) -> None:
    """Pack a folder of this machine as `Sandbox.get` describes. Raises LimitExceededError past a limit.

    A file with several names is packed once; its other names become hard links. A missing folder gives an
    archive without members, and so does a folder that is reached through a link, at or below `below`. Files
    may change meanwhile: no link is followed.
    """
    cursor = _readable(lambda: FolderCursor(below))
    if cursor is None:
        save(empty_archive(), archive, limit_bytes)
        return
    with cursor:
        pack_at(cursor, folder.relative_to(below).parts, archive, limit_bytes)


def pack_at(cursor: FolderCursor, parts: Parts, archive: Path, limit_bytes: int) -> None:
    """As `pack_folder`, the folder `parts` of a cursor."""
    save(archive_chunks(_Walk(cursor, parts).entries()), archive, limit_bytes)


@dataclass(slots=True)
class _Subfolders:
    """The names of folders that are still to be entered, each ended by a zero byte."""

    names: bytes
    position: int = 0

    def take(self) -> str | None:
        """The next one; None after the last."""
        if self.position == len(self.names):
            return None
        start, self.position = self.position, self.names.index(b"\0", self.position) + 1
        return os.fsdecode(self.names[start : self.position - 1])


class _Walk:
    """Yields the entries of a folder, each folder's together and before its subfolders' entries."""

    def __init__(self, cursor: FolderCursor, start: Parts) -> None:
        self._cursor = cursor
        self._start = start
        self._first_names: dict[int, str] = {}
        self._first_name_bytes = 0

    def entries(self) -> Iterator[Entry]:
        """Names begin with "./"."""
        budget, cursor, parts = PackBudget(), self._cursor, list(self._start)
        top = _readable(lambda: os.fstat(cursor.enter(self._start)))
        if top is None:
            return
        yield header_of(top, "."), ()
        path, pending = ".", list[_Subfolders]()
        while True:
            subfolders = bytearray()
            yield from self._in_folder(tuple(parts), path, budget, subfolders)
            pending.append(_Subfolders(bytes(subfolders)))
            while (name := pending[-1].take()) is None:
                budget.keep(-len(pending.pop().names))
                if not pending:
                    return
                parts.pop()
                path = path[: path.rindex("/")]
            budget.look_at_time()  # also for folders that have no entries
            parts.append(name)
            path = f"{path}/{name}"

    def _in_folder(
        self, parts: Parts, path: str, budget: PackBudget, subfolders: bytearray
    ) -> Iterator[Entry]:
        """The entries of one folder; none if it cannot be read."""
        folder = _readable(lambda: self._cursor.enter(parts))
        listing = None if folder is None else _readable(lambda: os.scandir(folder))
        if folder is None or listing is None:
            return
        with listing:
            while (found := _readable(lambda: next(listing, None))) is not None:
                name = encoded(found.name)
                budget.count(name)
                entry = self._entry(folder, found, f"{path}/{found.name}")
                if entry is None:
                    continue
                if entry[0].kind is Kind.FOLDER:
                    budget.keep(len(name) + 1)
                    subfolders += name + b"\0"
                yield entry

    def _entry(self, folder: int, found: os.DirEntry[str], member_name: str) -> Entry | None:
        """A file as an entry owned by root; None for sockets, devices and unreadable files."""

        def entry() -> Entry | None:
            name, status = found.name, found.stat(follow_symlinks=False)
            member = header_of(status, member_name)
            if member.kind is Kind.SYMLINK:
                return replace(member, link=os.readlink(name, dir_fd=folder)), ()
            if member.kind is Kind.FILE:
                if status.st_nlink > 1:
                    first = self._first_name(status, member_name)
                    if first is not None:
                        return replace(member, kind=Kind.HARD_LINK, size=0, link=first), ()
                return member, file_chunks(
                    lambda: archives.open_accessible(name, OPEN_FLAGS, folder, 0o600), status.st_size
                )
            return None if member.kind is Kind.UNKNOWN else (member, ())

        return _readable(entry)

    def _first_name(self, status: os.stat_result, member_name: str) -> str | None:
        """The name under which a file with several names was packed before; else this name is remembered."""
        inode = status.st_dev << 64 | status.st_ino
        if (first := self._first_names.get(inode)) is None:
            cost = _FIRST_NAME_COST + len(encoded(member_name))
            if self._first_name_bytes + cost <= MAX_FIRST_NAME_BYTES:
                self._first_name_bytes += cost
                self._first_names[inode] = member_name
        return first


def _readable(read: Callable[[], _T]) -> _T | None:
    """What `read` returns; None if a file cannot be read, which is up to its owner.

    Raises OSError for a fault of the machine: it must not make a folder look empty.
    """
    try:
        return read()
    except OSError as error:
        if error.errno in _FAULTS_OF_THE_MACHINE:
            raise
        return None
