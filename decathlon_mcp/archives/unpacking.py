"""Checked members of archives: joined into one archive, handed to an engine, or written to this machine."""

from __future__ import annotations

import errno
import gzip
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NoReturn, TypeVar, cast

from msgspec.structs import replace

from decathlon_mcp.archives.packing import FolderCursor, Parts
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
    archive_size,
    clamped_mtime,
)
from decathlon_mcp.errors import BadRequestError

_GZIP_MAGIC = b"\x1f\x8b"
_UNPACKED = (Kind.FILE, Kind.FOLDER, Kind.SYMLINK, Kind.HARD_LINK)
_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ERRORS_OF_THE_ARCHIVE = frozenset(
    {errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT}
)
_T = TypeVar("_T")


def checked_entries(archive: ArchiveSource) -> Iterator[Entry]:
    """The members that may be unpacked, without the archive's own folder. Blocks.

    A body must be read, if at all, before the next entry is asked for. Names and targets of hard links are
    relative and normalized, modes reduced to permissions. Raises BadRequestError if the archive is not a
    whole tar, and for devices, FIFOs, sparse files, and members or relative links that lead outside; so does
    reading a body.
    """
    if isinstance(archive, StreamedArchive):
        # The maker of the members has checked them. A workspace's members pass here several times on their
        # way, and each check costs as much as to create the file.
        yield from archive.entries()
        return
    name = "the archive" if isinstance(archive, bytes) else str(archive)
    with BytesIO(archive) if isinstance(archive, bytes) else archive.open("rb") as file:
        magic = file.read(2)
        file.seek(0)
        if not magic:
            raise BadRequestError(f"{name} is not a whole tar archive: it is empty")
        if magic == _GZIP_MAGIC:
            with gzip.GzipFile(fileobj=file) as plain:
                yield from _entries(ArchiveReader(cast("BinaryIO", plain), None), name, _checked)
        else:
            yield from _entries(ArchiveReader.of_file(file), name, _checked)


def _entries(reader: ArchiveReader, name: str, check: Callable[[Member], Member | None]) -> Iterator[Entry]:
    """The members of the archive `name` as `check` returns them, with their bodies."""
    for read in _whole(iter(reader), name):
        if (member := check(read)) is not None:
            yield member, _whole(reader.body(), name) if member.kind is Kind.FILE else ()


def _whole(parts: Iterator[_T], name: str) -> Iterator[_T]:
    """Parts of the archive `name`. Raises BadRequestError where it is broken."""
    try:
        yield from parts
    except BrokenArchiveError as error:
        raise BadRequestError(f"{name} is not a whole tar archive: {error}") from error


def _checked(member: Member) -> Member | None:
    """The member with a relative name, if a sandbox may have it; None for the archive's own folder."""
    if member.kind is Kind.SYMLINK:
        _check_symlink("/".join(_parts(member.name)), member.link)
    return _normalized(member)


def _of_root(member: Member) -> Member | None:
    """The member as it is in a root file system that is unpacked; None if it is left out."""
    if member.kind in (Kind.CHARACTER_DEVICE, Kind.BLOCK_DEVICE, Kind.FIFO):
        return None
    # Engines write absolute names in none of their archives, and "./" before them in some.
    normalized = _normalized(member)
    return normalized and replace(normalized, mode=normalized.mode & 0o755 | 0o400)


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


def joined(parts: Sequence[tuple[PurePosixPath, ArchiveSource]]) -> StreamedArchive:
    """One archive of several, in this order, each with the folder below which its members are placed.

    These folders become members too, unless an earlier part has them. Every member is checked on its way from
    its part: reading it raises BadRequestError for a part that is no whole archive or has a member that no
    sandbox unpacks.
    """

    def entries() -> Iterator[Entry]:
        folders: set[str] = set()
        for prefix, archive in parts:
            for folder in (*reversed(prefix.parents[:-1]), prefix) if prefix.name else ():
                if str(folder) not in folders:
                    folders.add(str(folder))
                    yield Member(name=str(folder), kind=Kind.FOLDER, mode=0o755), ()
            for member, body in checked_entries(archive):
                if member.kind is Kind.FOLDER:
                    folders.add(str(prefix / member.name))
                if prefix.name:
                    link = f"{prefix}/{member.link}" if member.kind is Kind.HARD_LINK else member.link
                    member = replace(member, name=f"{prefix}/{member.name}", link=link)
                yield member, body

    return StreamedArchive(entries, sum(archive_size(archive) for _, archive in parts))


def selected(archive: ArchiveSource, names: Collection[str]) -> StreamedArchive:
    """The members with one of these names directly below the folder that was packed.

    Reading it raises BadRequestError also for a hard link to a file that is left out.
    """

    def entries() -> Iterator[Entry]:
        for member, body in checked_entries(archive):
            if member.name.partition("/")[0] not in names:
                continue
            if member.kind is Kind.HARD_LINK and member.link.partition("/")[0] not in names:
                raise BadRequestError(
                    f"{member.name!r} is the same file as {member.link!r}, which is removed"
                )
            yield member, body

    return StreamedArchive(entries, archive_size(archive))


def with_owner(archive: ArchiveSource, user: int, group: int) -> Iterator[bytes]:
    """The checked archive as a plain tar in chunks, all members owned by one user. Raises BadRequestError."""
    return archive_chunks(
        (replace(member, user=user, group=group), body) for member, body in checked_entries(archive)
    )


def unpack(archive: ArchiveSource, folder: Path, *, below: Path) -> None:
    """Unpack into `folder`, which lies at or below the existing `below`, never writing through a link.

    Raises BadRequestError for an archive that cannot be unpacked so.
    """
    try:
        cursor = FolderCursor(below, creates=True)
    except OSError as error:
        _raise_fault(error, below.name)
    with cursor:
        unpack_entries(checked_entries(archive), cursor, folder.relative_to(below).parts)


def unpack_root(chunks: Iterable[bytes], folder: Path, owner: tuple[int, int] | None) -> None:
    """Unpack a root file system, in chunks of a plain tar, into an existing folder.

    Devices and FIFOs are left out. Links may lead anywhere, and none is followed. Everything belongs to
    `owner` (user and group; only root can give files away), who can read all of it, and alone may change it;
    set-id bits are dropped.

    Raises BadRequestError for an archive that is no such thing.
    """
    reader = ArchiveReader(cast("BinaryIO", ForwardFile(chunks)), None)
    with FolderCursor(folder, creates=True) as cursor:
        unpack_entries(_entries(reader, "the image's archive", _of_root), cursor, owner=owner)


def unpack_entries(
    entries: Iterable[Entry],
    cursor: FolderCursor,
    start: Parts = (),
    *,
    owner: tuple[int, int] | None = None,
) -> None:
    """Unpack `checked_entries` into the folder `start` of the cursor, never writing through a link.

    `owner`: the user and group that the files are given to. Raises BadRequestError, OSError.
    """
    try:
        cursor.enter(start)
    except OSError as error:
        _raise_fault(error, "/".join(start))
    with cursor.second() as targets:
        for member, body in entries:
            try:
                _unpack(member, body, cursor, targets, start)
                if owner is not None:
                    *above, name = _placed(member.name, start)
                    parent = cursor.enter(tuple(above))
                    os.chown(name, *owner, dir_fd=parent, follow_symlinks=False)
            except OSError as error:
                _raise_fault(error, member.name)


def _raise_fault(error: OSError, name: str) -> NoReturn:
    """Raise BadRequestError for an error that the archive explains, else the error itself."""
    if error.errno not in _ERRORS_OF_THE_ARCHIVE:
        raise error
    raise BadRequestError(f"cannot unpack {name[:200]!r}: {error.strerror}") from error


def _unpack(member: Member, body: Body, cursor: FolderCursor, targets: FolderCursor, start: Parts) -> None:
    if member.kind is Kind.FOLDER:
        os.fchmod(cursor.enter(start + tuple(member.name.split("/"))), member.mode | 0o700)
        return
    parts = _placed(member.name, start)
    name, parent = parts.pop(), cursor.enter(tuple(parts))
    try:
        _create(member, body, parent, name, targets, start)
    except FileExistsError:
        os.unlink(name, dir_fd=parent)
        _create(member, body, parent, name, targets, start)


def _create(member: Member, body: Body, parent: int, name: str, targets: FolderCursor, start: Parts) -> None:
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
        _write_file(member, body, os.open(name, _NEW_FILE_FLAGS, 0o600, dir_fd=parent))


def _placed(name: str, start: Parts) -> list[str]:
    return [*start, *name.split("/")]


def _write_file(member: Member, body: Body, descriptor: int) -> None:
    try:
        for chunk in body:
            view = memoryview(chunk)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fchmod(descriptor, member.mode)
        mtime = clamped_mtime(member.mtime)
        os.utime(descriptor, (mtime, mtime))
    finally:
        os.close(descriptor)
