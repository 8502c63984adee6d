"""Writes tar archives from memory and from files; for folders of sandboxes see `packing`.

Every archive is a sequence of entries (a header and its body) that `archive_chunks` turns into bytes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from decathlon_sandbox.archives import MAX_MTIME, header
from msgspec.structs import replace

from decathlon_mcp.archives.reading import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    Body,
    Kind,
    Member,
)
from decathlon_mcp.errors import LimitExceededError

# The file may have been replaced since it was looked at: never follow a link, never wait for a FIFO's writer.
OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_END = bytes(2 * BLOCK_BYTES)
_KINDS = {
    stat.S_IFREG: Kind.FILE,
    stat.S_IFDIR: Kind.FOLDER,
    stat.S_IFLNK: Kind.SYMLINK,
    stat.S_IFIFO: Kind.FIFO,
}

Entry = tuple[Member, Body]


@dataclass(frozen=True, slots=True)
class StreamedArchive:
    """An archive that is stored nowhere: `entries` makes its members, again each time that it is read.

    Who makes them has checked them: they are what `checked_entries` would yield. `size_bytes` is about its
    length.
    """

    entries: Callable[[], Iterator[Entry]]
    size_bytes: int


ArchiveSource = Path | bytes | StreamedArchive
"""A whole archive: a tar, plain or gzip, or made while it is read."""


def archive_size(archive: ArchiveSource) -> int:
    """About the length of an archive, in bytes; of a compressed archive as it is stored."""
    match archive:
        case bytes():
            return len(archive)
        case StreamedArchive():
            return archive.size_bytes
        case _:
            return archive.stat().st_size


def archive_chunks(entries: Iterable[Entry]) -> Iterator[bytes]:
    """A whole archive in chunks of about `CHUNK_BYTES`.

    Each entry's body is consumed before the next entry is asked for. A body shorter than its member's size is
    filled with zeros; ValueError for a longer body.
    """
    return _gathered(_pieces(entries))


def _pieces(entries: Iterable[Entry]) -> Iterator[bytes]:
    for member, body in entries:
        yield _header(member)
        remaining = member.size
        for chunk in body:
            remaining -= len(chunk)
            if remaining < 0:
                raise ValueError(f"the body of {member.name!r} is longer than {member.size} bytes")
            yield chunk
        while remaining:  # a file that became shorter while it was read
            zeros = bytes(min(remaining, CHUNK_BYTES))
            remaining -= len(zeros)
            yield zeros
        if padding := -member.size % BLOCK_BYTES:
            yield bytes(padding)
    yield _END


def _header(member: Member) -> bytes:
    # Without `tarfile`, which takes five times as long: an agent's workspace may have 250,000 members.
    name = encoded(member.name)
    if member.kind is Kind.FOLDER and not name.endswith(b"/"):
        name += b"/"
    mode, link, mtime = member.mode & 0o7777, encoded(member.link), member.mtime
    return header(name, member.kind.value, member.size, link, mode, mtime, member.user, member.group)


def encoded(name: str) -> bytes:
    """A member's name as the bytes that it has in an archive."""
    return name.encode("utf-8", "surrogateescape")


def clamped_mtime(mtime: float) -> int:
    """Whole seconds that a header and a file system can store."""
    return max(0, min(int(mtime), MAX_MTIME))


def _gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in larger pieces, since each becomes a write or a send."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        if len(buffer) >= CHUNK_BYTES:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


def save(chunks: Iterable[bytes], archive: Path, limit_bytes: int | None = None) -> None:
    """Write an archive that arrives in chunks to a file.

    Raises LimitExceededError past `limit_bytes`. After any error there is no file.
    """
    written = 0
    try:
        with archive.open("wb") as out:
            for chunk in chunks:
                written += len(chunk)
                _check_limit(written, limit_bytes)
                out.write(chunk)
    except BaseException:
        archive.unlink(missing_ok=True)
        raise


def _check_limit(size: int, limit_bytes: int | None) -> None:
    if limit_bytes is not None and size > limit_bytes:
        raise LimitExceededError(
            f"the files in the sandbox exceed the limit of {limit_bytes} bytes",
            budget="bytes",
            limitBytes=limit_bytes,
        )


def empty_archive() -> Iterator[bytes]:
    """An archive without members, in chunks."""
    return archive_chunks(())


def pack_files(files: Mapping[str, bytes], *, mode: int = 0o666) -> bytes:
    """A whole archive of a few small files, by name; by default everybody may write to them."""
    return b"".join(
        archive_chunks(
            (Member(name=name, kind=Kind.FILE, size=len(content), mode=mode), (content,))
            for name, content in files.items()
        )
    )


def pack_empty_folders(names: Iterable[str], *, user: int = 0, group: int = 0) -> bytes:
    """A whole archive of empty folders."""
    return b"".join(
        archive_chunks(
            (Member(name=name, kind=Kind.FOLDER, mode=0o755, user=user, group=group), ()) for name in names
        )
    )


def header_of(status: os.stat_result, name: str) -> Member:
    """A header with the kind, the permissions and the time of a file; of a link it lacks the target."""
    mode = status.st_mode
    kind = _KINDS.get(stat.S_IFMT(mode), Kind.UNKNOWN)
    size = status.st_size if kind is Kind.FILE else 0
    return Member(
        name=name, kind=kind, size=size, mode=stat.S_IMODE(mode), mtime=clamped_mtime(status.st_mtime)
    )


def path_entry(path: str, name: str) -> Entry | None:
    """A file, folder, symlink or FIFO of this machine as an entry owned by root; None for anything else."""
    status = os.lstat(path)
    member = header_of(status, name)
    if member.kind is Kind.SYMLINK:
        return replace(member, link=os.readlink(path)), ()  # noqa: PTH115
    if member.kind is Kind.FILE:
        return member, file_chunks(lambda: os.open(path, OPEN_FLAGS), status.st_size)
    return None if member.kind is Kind.UNKNOWN else (member, ())


def file_chunks(open_file: Callable[[], int], size: int) -> Iterator[bytes]:
    """At most `size` bytes of a file that is opened when the first are asked for."""
    if not size:
        return
    descriptor = open_file()
    try:
        remaining = size
        while remaining and (chunk := os.read(descriptor, min(remaining, CHUNK_BYTES))):
            remaining -= len(chunk)
            yield chunk
    finally:
        os.close(descriptor)
