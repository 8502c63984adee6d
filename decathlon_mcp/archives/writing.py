"""Writes tar archives: from folders of this machine, from a checkout, from memory.

Every archive is a sequence of entries (a header and its body) that `archive_chunks` turns into bytes.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from decathlon_mcp.archives.reading import BLOCK_BYTES, CHUNK_BYTES, ArchiveReader, Body, Kind, Member
from decathlon_mcp.errors import LimitExceededError

MAX_MTIME = (1 << 33) - 1
"""Latest time in a plain header field, and one that every file system can store."""

# The file may have been replaced since it was looked at: never follow a link, never wait for a FIFO's writer.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_END = bytes(2 * BLOCK_BYTES)

Entry = tuple[Member, Body]


@dataclass(frozen=True, slots=True)
class StreamedArchive:
    """An archive that is stored nowhere: `entries` makes its members, again each time that it is read.

    `size_bytes` is about its length.
    """

    entries: Callable[[], Iterator[Entry]]
    size_bytes: int


ArchiveSource = Path | bytes | StreamedArchive
"""A whole archive: a tar, plain or gzip, or one that is made while it is read."""


def archive_size(archive: ArchiveSource) -> int:
    """About the length of an archive, in bytes; of a compressed one as it is stored."""
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
    filled with zeros; ValueError for a longer one.
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
        yield bytes(-member.size % BLOCK_BYTES)
    yield _END


def _header(member: Member) -> bytes:
    info = tarfile.TarInfo(member.name)
    info.type, info.linkname, info.size = member.kind.value, member.link, member.size
    info.mode, info.mtime = member.mode, clamped_mtime(member.mtime)
    info.uid, info.gid = member.user, member.group
    # GNU's format takes names of any bytes and length, and writes no field besides these.
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


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
            f"the files in the sandbox exceed the limit of {limit_bytes} bytes", limitBytes=limit_bytes
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


def pack_folder(folder: Path, archive: Path, limit_bytes: int, *, below: Path) -> None:
    """Pack a folder of this machine as `Sandbox.get` describes. Raises LimitExceededError past `limit_bytes`.

    A missing folder gives an archive without members, and so does one reached through a link below `below`.
    """
    path_below = [path for path in (folder, *folder.parents) if path != below and path.is_relative_to(below)]
    linked = any(path.is_symlink() for path in path_below)
    save(empty_archive() if linked else archive_chunks(_folder_entries(folder)), archive, limit_bytes)


def _folder_entries(folder: Path) -> Iterator[Entry]:
    """Depth first, names sorted; names begin with "./"."""
    top = os.fspath(folder)
    names = ["."] if _is_folder(top) else []
    while names:
        name = names.pop()
        # Plain strings, not Path: there may be hundreds of thousands.
        path = os.path.join(top, name)  # noqa: PTH118
        entry = path_entry(path, name)
        if entry is None:
            continue
        yield entry
        if entry[0].kind is Kind.FOLDER:
            names += sorted((f"{name}/{child}" for child in os.listdir(path)), reverse=True)  # noqa: PTH208


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def path_entry(path: str, name: str) -> Entry | None:
    """A file, folder, symlink or FIFO of this machine as an entry owned by root; None for anything else."""
    status = os.lstat(path)
    member = Member(
        name=name, kind=Kind.FILE, mode=stat.S_IMODE(status.st_mode), mtime=clamped_mtime(status.st_mtime)
    )
    if stat.S_ISDIR(status.st_mode):
        return replace(member, kind=Kind.FOLDER), ()
    if stat.S_ISLNK(status.st_mode):
        return replace(member, kind=Kind.SYMLINK, link=os.readlink(path)), ()  # noqa: PTH115
    if stat.S_ISFIFO(status.st_mode):
        return replace(member, kind=Kind.FIFO), ()
    if stat.S_ISREG(status.st_mode):
        return replace(member, size=status.st_size), _file_chunks(path, status.st_size)
    return None


def _file_chunks(path: str, size: int) -> Iterator[bytes]:
    with os.fdopen(os.open(path, _OPEN_FLAGS), "rb") as file:
        remaining = size
        while remaining and (chunk := file.read(min(remaining, CHUNK_BYTES))):
            remaining -= len(chunk)
            yield chunk


def append_from_checkout(
    archive: Path, checkout: Path, sources: Mapping[PurePosixPath, PurePosixPath]
) -> list[Path]:
    """Append files, folders and links of `checkout` to `archive`, which is created if missing.

    `sources` maps each member's name to the path below `checkout` that it is read from. The same checkout
    gives the same bytes: members are sorted, belong to root, and keep permissions and time (whole seconds).
    Links that lead out of `checkout` are left out and returned.
    """
    left_out: list[Path] = []
    with archive.open("r+b" if archive.exists() else "w+b") as file:
        reader = ArchiveReader.of_file(file)
        for _ in reader:
            pass
        file.seek(reader.end)
        for chunk in archive_chunks(_checkout_entries(checkout, sources, left_out)):
            file.write(chunk)
        file.truncate()
    return left_out


def _checkout_entries(
    checkout: Path, sources: Mapping[PurePosixPath, PurePosixPath], left_out: list[Path]
) -> Iterator[Entry]:
    base = checkout.resolve()
    for name in sorted(sources):
        path = checkout / sources[name]
        if path.is_symlink() and (path.readlink().is_absolute() or not path.resolve().is_relative_to(base)):
            left_out.append(path)
            continue
        entry = path_entry(str(path), str(name))
        if entry is not None and entry[0].kind is not Kind.FIFO:
            member, body = entry
            yield replace(member, mode=member.mode & 0o777), body
