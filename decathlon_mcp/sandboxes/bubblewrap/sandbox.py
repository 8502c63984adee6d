"""One sandbox in namespaces of its own. Its files are in memory and are reached through its first process."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeVar

from anyio import to_thread

from decathlon_mcp.archives.folder_cursor import FolderCursor
from decathlon_mcp.archives.packing import pack_at
from decathlon_mcp.archives.reading import Kind, Member
from decathlon_mcp.archives.unpacking import MemberReader, open_archive, unpack_members
from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.errors import BadRequestError, LimitExceededError
from decathlon_mcp.sandboxes.base import SCRATCH, SandboxSpec, check_folder
from decathlon_mcp.sandboxes.bubblewrap.mounts import WritableFolder
from decathlon_mcp.sandboxes.bubblewrap.resources import BubblewrapResources
from decathlon_mcp.sandboxes.processes.resources import closing_descriptor
from decathlon_mcp.sandboxes.processes.sandbox import ProcessSandbox
from decathlon_mcp.sandboxes.processes.signals import ProcessSignaller
from decathlon_mcp.sandboxes.usage import Usage

MAX_BATCH = 256
"""Members without a body that are read at once."""

_Read = TypeVar("_Read")

_libc = ctypes.CDLL(None)


class BubblewrapSandbox(ProcessSandbox):
    """See `base.Sandbox`.

    `put` accepts folders at or below the suite's root and the user's home, since everything else belongs to
    the image. `user`: the user and group of its processes on this machine, if they are not the server's own.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        resources: BubblewrapResources,
        signaller: ProcessSignaller,
        *,
        folders: Sequence[WritableFolder],
        image_digest: str | None,
        user: tuple[int, int] | None,
        paused: bool = False,
    ) -> None:
        super().__init__(spec, resources, signaller, paused=paused)
        self.root = spec.root
        self.image_digest = image_digest
        self._open_root = resources.open_root
        self._writable = [folder.path for folder in folders if folder.path != SCRATCH]
        self._user = user
        self._group = resources.group

    async def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None:
        self._check_open()
        below = next((path for path in self._writable if folder.is_relative_to(path)), None)
        if below is None or ".." in folder.parts:
            places = ", ".join(map(str, self._writable))
            raise BadRequestError(f"files are copied to places at or below {places}, not to {folder}")
        await self._run(lambda: self._unpack(folder, below, archive))

    def _unpack(self, folder: PurePosixPath, below: PurePosixPath, archive: ArchiveSource) -> None:
        """`put`. `below`: the writable folder that `folder` is, or is in. Blocks."""
        try:
            with (
                open_archive(archive) as reader,
                closing_descriptor(self._open_root()) as root,
                FolderCursor(root) as place,
                FolderCursor(place.enter(below.parts[1:]), creates=True) as cursor,
                _acting_as(self._user),
            ):
                unpack_members(_ServersReader(reader, self._user), cursor, folder.relative_to(below).parts)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise files_do_not_fit(folder) from error

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        self._check_open()
        check_folder(folder)
        await self._run(lambda: self._pack(folder, archive, limit_bytes))

    def _pack(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        """`get`. Blocks."""
        with closing_descriptor(self._open_root()) as root, FolderCursor(root) as cursor:
            pack_at(cursor, folder.parts[1:], archive, limit_bytes)

    async def usage(self, sandboxes: int) -> Usage:
        """See `MeasuredSandbox`. Its files are in its memory."""
        return await to_thread.run_sync(self._group.usage, limiter=self._threads)

    async def _run(self, work: Callable[[], None]) -> None:
        await to_thread.run_sync(work, limiter=self._threads, abandon_on_cancel=True)


def files_do_not_fit(folder: PurePosixPath) -> LimitExceededError:
    return LimitExceededError(f"the files for {folder} do not fit into the sandbox's memory", budget="memory")


@contextmanager
def _acting_as(user: tuple[int, int] | None) -> Generator[None]:
    """Create files as this user and group, in this thread. Only root may; None changes nothing.

    In a file system that belongs to another user namespace, the kernel refuses files of users who have no
    number there, root's too (EOVERFLOW).
    """
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


class _ServersReader:
    """Reads an archive as the server, in a thread that is acting as `user`."""

    # A streamed archive opens the server's files while it is read.
    def __init__(self, reader: MemberReader, user: tuple[int, int] | None) -> None:
        self._reader = reader
        self._user = user
        self._remaining = 0
        self.is_checked = reader.is_checked

    def __iter__(self) -> Iterator[Member]:
        members = iter(self._reader)
        while batch := self._as_server(lambda: _until_body(members)):
            for self._remaining, member in zip(reversed(range(len(batch))), batch, strict=True):
                yield member

    def body(self) -> Iterator[bytes]:
        if self._remaining:  # only the last member of a batch has a body
            return
        chunks = self._reader.body()
        while (chunk := self._as_server(lambda: next(chunks, None))) is not None:
            yield chunk

    def _as_server(self, read: Callable[[], _Read]) -> _Read:
        if self._user is None:
            return read()
        _act_as_server()
        try:
            return read()
        finally:
            _act_as(*self._user)


def _until_body(members: Iterator[Member]) -> list[Member]:
    """The next members, up to the first with a body, so that few changes of the user serve many links."""
    batch: list[Member] = []
    for member in itertools.islice(members, MAX_BATCH):
        batch.append(member)
        if member.kind is Kind.FILE and member.size:
            break
    return batch
