"""Unpacks archives: checks every member, then hands it to an engine or writes it to this machine."""

from __future__ import annotations

import errno
import gzip
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NoReturn, Protocol, cast

from msgspec.structs import replace

from decathlon_mcp.archives.folder_cursor import FolderCursor, Parts
from decathlon_mcp.archives.reading import (
    ArchiveReader,
    Body,
    BrokenArchiveError,
    ForwardFile,
    Kind,
    Member,
)
from decathlon_mcp.archives.writing import (
    ArchiveSource,
    Entry,
    StreamedArchive,
    archive_chunks,
    clamped_mtime,
)
from decathlon_mcp.errors import BadRequestError

_GZIP_MAGIC = b"\x1f\x8b"
_UNPACKED = (Kind.FILE, Kind.FOLDER, Kind.SYMLINK, Kind.HARD_LINK)
_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ERRORS_OF_THE_ARCHIVE = frozenset(
    {errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT}
)


class MemberReader(Protocol):
    """Iterates over the members of an archive. `body` reads the member that was yielded last.

    `is_checked`: `checked_members` would change and refuse none of them.
    """

    @property
    def is_checked(self) -> bool: ...

    def __iter__(self) -> Iterator[Member]: ...

    def body(self) -> Iterator[bytes]: ...


class _EntryReader:
    """The members of a streamed archive."""

    is_checked = True

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries
        self._body: Body = ()

    def __iter__(self) -> Iterator[Member]:
        for member, body in self._entries:
            self._body = body
            yield member

    def body(self) -> Iterator[bytes]:
        return iter(self._body)


@contextmanager
def open_archive(archive: ArchiveSource) -> Generator[MemberReader]:
    """A reader of an archive. Raises BadRequestError if it is not a whole tar archive."""
    if isinstance(archive, StreamedArchive):
        yield _EntryReader(archive.entries())
        return
    name = "the archive" if isinstance(archive, bytes) else str(archive)
    with BytesIO(archive) if isinstance(archive, bytes) else archive.open("rb") as file:
        magic = file.read(2)
        file.seek(0)
        if not magic:
            raise BadRequestError(f"{name} is not a whole tar archive: it is empty")
        try:
            if magic == _GZIP_MAGIC:
                with gzip.GzipFile(fileobj=file) as plain:
                    yield ArchiveReader(cast("BinaryIO", plain), None)
            else:
                yield ArchiveReader.of_file(file)
        except BrokenArchiveError as error:
            raise BadRequestError(f"{name} is not a whole tar archive: {error}") from error


def checked_members(reader: MemberReader) -> Iterator[Member]:
    """Members that may be unpacked, without the archive's own folder.

    Names and targets of hard links are relative and normalized, modes reduced to permissions. Raises
    BadRequestError for devices, FIFOs, sparse files, and members or relative links that lead outside.
    """
    if reader.is_checked:
        # A workspace's members pass here several times on their way, and each check costs as much as to
        # create the file.
        yield from reader
        return
    for member in reader:
        if member.kind is Kind.SYMLINK:
            _check_symlink("/".join(_parts(member.name)), member.link)
        if (normalized := _normalized(member)) is not None:
            yield normalized


def _normalized(member: Member) -> Member | None:
    """The member with a relative name; None for the archive's own folder."""
    name = "/".join(_parts(member.name))
    if member.name_unreadable:
        raise BadRequestError(f"the name of an archive's member is too long: {member.name[:200]!r}")
    if member.kind not in _UNPACKED:
        raise BadRequestError(f"an archive's member is no file, folder or link: {member.name[:200]!r}")
    link = "/".join(_parts(member.link)) if member.kind is Kind.HARD_LINK else member.link
    size = member.size if member.kind is Kind.FILE else 0
    mode = member.mode & 0o777
    return replace(member, name=name, link=link, size=size, mode=mode) if name else None


def _parts(name: str) -> Parts:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts:
        raise BadRequestError(f"an archive's member lies outside its folder: {name[:200]!r}")
    return parts


def _check_symlink(name: str, target: str) -> None:
    # Docker refuses relative links that lead out of the folder it unpacks into, so every provider does.
    # Absolute links are data: nothing here follows them.
    depth = name.count("/")
    for part in () if target.startswith("/") else target.split("/"):
        depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
        if depth < 0:
            raise BadRequestError(f"an archive's link leads outside its folder: {name[:200]!r}")


def checked_entries(reader: MemberReader) -> Iterator[Entry]:
    """`checked_members`, with their bodies."""
    for member in checked_members(reader):
        yield member, reader.body() if member.kind is Kind.FILE else ()


def with_owner(archive: ArchiveSource, user: int, group: int) -> Iterator[bytes]:
    """The checked archive as a plain tar in chunks, all members owned by one user. Raises BadRequestError."""
    with open_archive(archive) as reader:
        yield from archive_chunks(
            (replace(member, user=user, group=group), body) for member, body in checked_entries(reader)
        )


def unpack(archive: ArchiveSource, folder: Path, *, below: Path) -> None:
    """Unpack into `folder`, which lies at or below the existing `below`, never writing through a link.

    Raises BadRequestError for an archive that cannot be unpacked so.
    """
    with open_archive(archive) as reader:
        try:
            cursor = FolderCursor(below, creates=True)
        except OSError as error:
            _raise_fault(error, below.name)
        with cursor:
            unpack_members(reader, cursor, folder.relative_to(below).parts)


def unpack_members(reader: MemberReader, cursor: FolderCursor, start: Parts) -> None:
    """Unpack what `checked_members` allows into the folder `start` of the cursor. Raises BadRequestError."""
    try:
        cursor.enter(start)
    except OSError as error:
        _raise_fault(error, "/".join(start))
    with cursor.second() as targets:
        for member in checked_members(reader):
            try:
                _unpack(reader, member, cursor, targets, start)
            except OSError as error:
                _raise_fault(error, member.name)


def unpack_root(chunks: Iterable[bytes], folder: Path, owner: tuple[int, int] | None) -> None:
    """Unpack a root file system, in chunks of a plain tar, into an existing folder.

    Devices and FIFOs are left out. Links may lead anywhere, and none is followed. Everything belongs to
    `owner` (user and group; only root can give files away), who can read all of it, and alone may change it;
    set-id bits are dropped.

    Raises BadRequestError for an archive that is no such thing.
    """
    reader = ArchiveReader(cast("BinaryIO", ForwardFile(chunks)), None)
    try:
        with FolderCursor(folder, creates=True) as cursor, cursor.second() as targets:
            for member in _root_members(reader):
                try:
                    _unpack(reader, member, cursor, targets, ())
                    if owner is not None:
                        *above, name = member.name.split("/")
                        parent = cursor.enter(tuple(above))
                        os.chown(name, *owner, dir_fd=parent, follow_symlinks=False)
                except OSError as error:
                    _raise_fault(error, member.name)
    except BrokenArchiveError as error:
        raise BadRequestError(f"the image's archive is broken: {error}") from error


def _root_members(reader: ArchiveReader) -> Iterator[Member]:
    for member in reader:
        if member.kind in (Kind.CHARACTER_DEVICE, Kind.BLOCK_DEVICE, Kind.FIFO):
            continue
        # Engines write absolute names in none of their archives, and "./" before them in some.
        if (normalized := _normalized(member)) is not None:
            yield replace(normalized, mode=normalized.mode & 0o755 | 0o400)


def _raise_fault(error: OSError, name: str) -> NoReturn:
    """Raise BadRequestError for an error that the archive explains, else the error itself."""
    if error.errno not in _ERRORS_OF_THE_ARCHIVE:
        raise error
    raise BadRequestError(f"cannot unpack {name[:200]!r}: {error.strerror}") from error


def _unpack(
    reader: MemberReader, member: Member, cursor: FolderCursor, targets: FolderCursor, start: Parts
) -> None:
    if member.kind is Kind.FOLDER:
        os.fchmod(cursor.enter(start + tuple(member.name.split("/"))), member.mode | 0o700)
        return
    parts = _placed(member.name, start)
    name, parent = parts.pop(), cursor.enter(tuple(parts))
    try:
        _create(reader, member, parent, name, targets, start)
    except FileExistsError:
        os.unlink(name, dir_fd=parent)
        _create(reader, member, parent, name, targets, start)


def _create(
    reader: MemberReader, member: Member, parent: int, name: str, targets: FolderCursor, start: Parts
) -> None:
    """Create the member in the folder `parent`. Raises FileExistsError before its body is read."""
    if member.kind is Kind.SYMLINK:
        os.symlink(member.link, name, dir_fd=parent)
    elif member.kind is Kind.HARD_LINK:
        # With one cursor, each link would move from its own folder to its target's and back.
        folder = _placed(member.link, start)
        target = folder.pop()
        source = targets.enter(tuple(folder))
        os.link(target, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
    else:
        _write_file(reader, member, os.open(name, _NEW_FILE_FLAGS, 0o600, dir_fd=parent))


def _placed(name: str, start: Parts) -> list[str]:
    return [*start, *name.split("/")]


def _write_file(reader: MemberReader, member: Member, descriptor: int) -> None:
    try:
        for chunk in reader.body():
            view = memoryview(chunk)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fchmod(descriptor, member.mode)
        mtime = clamped_mtime(member.mtime)
        os.utime(descriptor, (mtime, mtime))
    finally:
        os.close(descriptor)
