"""Unpacks an archive into the root of a sandbox, as the user that the sandbox's processes run as."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import TypeVar

from decathlon_mcp.archives.packing import FolderCursor
from decathlon_mcp.archives.unpacking import checked_entries, unpack_entries
from decathlon_mcp.archives.writing import ArchiveSource, Entry

MAX_BATCH = 256
"""Entries without a body that are read at once."""

_T = TypeVar("_T")
_libc = ctypes.CDLL(None)


def unpack_inside(
    archive: ArchiveSource,
    root: int,
    folder: PurePosixPath,
    *,
    below: PurePosixPath,
    user: tuple[int, int] | None,
) -> None:
    """Unpack into `folder`, which is the existing folder `below` or in it. Blocks.

    `root`: a descriptor of the sandbox's root. `user`: the user and group that create the files, in this
    thread; only root may name one, None is the server's own. In a file system that belongs to another user
    namespace, the kernel refuses files of users who have no number there, root's too (EOVERFLOW).

    Raises BadRequestError, OSError.
    """
    entries = checked_entries(archive)
    with (
        FolderCursor(root) as place,
        FolderCursor(place.enter(below.parts[1:]), creates=True) as cursor,
        _acting_as(user),
    ):
        if user is not None:
            entries = _read_as_server(entries, user)
        unpack_entries(entries, cursor, folder.relative_to(below).parts)


@contextmanager
def _acting_as(user: tuple[int, int] | None) -> Generator[None]:
    """Create files as this user and group, in this thread; None changes nothing."""
    if user is None:
        yield
        return
    try:
        _act_as(*user)
        yield
    finally:
        _act_as_server()


# setfsuid(2) is about a single thread, unlike setuid(3). It must come last, as it gives up the right to
# change the group, and first on the way back.
def _act_as(user: int, group: int) -> None:
    _libc.setfsgid(group)
    _libc.setfsuid(user)


def _act_as_server() -> None:
    _libc.setfsuid(os.geteuid())
    _libc.setfsgid(os.getegid())


def _read_as_server(entries: Iterator[Entry], user: tuple[int, int]) -> Iterator[Entry]:
    """The entries, read as the server in a thread that is acting as `user`.

    What makes a streamed archive opens the server's files meanwhile.
    """

    def as_server(read: Callable[[], _T]) -> _T:
        _act_as_server()
        try:
            return read()
        finally:
            _act_as(*user)

    def chunks(body: Iterator[bytes]) -> Iterator[bytes]:
        while (chunk := as_server(lambda: next(body, None))) is not None:
            yield chunk

    while batch := as_server(lambda: _until_body(entries)):
        for member, body in batch:
            yield member, chunks(iter(body)) if body else ()


def _until_body(entries: Iterator[Entry]) -> list[Entry]:
    """The next entries, up to the first with a body, so that few changes of the user serve many links."""
    batch: list[Entry] = []
    for entry in itertools.islice(entries, MAX_BATCH):
        batch.append(entry)
        if entry[1]:
            break
    return batch
