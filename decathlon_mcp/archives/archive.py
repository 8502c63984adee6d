"""Tar archives on their way into a sandbox, checked: only files, folders and links, all below one folder."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO

from decathlon_mcp.errors import BadRequestError

Parts = tuple[str, ...]

BLOCK_BYTES = tarfile.BLOCKSIZE
CHUNK_BYTES = 1 << 18


def parts_of(name: str) -> Parts:
    """The components of a member's name. Raises BadRequestError for one that leaves its folder."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts:
        raise BadRequestError(f"an archive's member lies outside its folder: {name[:200]!r}")
    return parts


@contextmanager
def reading(archive: Path | bytes) -> Generator[tarfile.TarFile]:
    """The archive, opened. Raises BadRequestError for what is no tar, or is cut short."""
    name = "the archive" if isinstance(archive, bytes) else str(archive)
    file = BytesIO(archive) if isinstance(archive, bytes) else archive.open("rb")
    with file:
        try:
            with tarfile.open(fileobj=file, mode="r:*") as tar:
                yield tar
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise BadRequestError(f"{name} is not a whole tar archive: {error}") from error


def members(tar: tarfile.TarFile) -> Iterator[tuple[Parts, tarfile.TarInfo]]:
    """The archive's members but its own folder. Raises BadRequestError for one that must not be unpacked."""
    for info in tar:
        parts = parts_of(info.name)
        if not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
            raise BadRequestError(f"an archive's member is no file, folder or link: {info.name[:200]!r}")
        if info.islnk():
            parts_of(info.linkname)
        if info.issym():
            _check_link(parts, info.linkname)
        if parts:
            yield parts, info


def _check_link(parts: Parts, target: str) -> None:
    """The engine takes no relative link that leads out of the folder unpacked into: so nobody does."""
    depth = len(parts) - 1
    for part in () if target.startswith("/") else target.split("/"):
        depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
        if depth < 0:
            raise BadRequestError(f"an archive's link leads outside its folder: {'/'.join(parts)[:200]!r}")


def owned(archive: Path | bytes, user: int, group: int) -> Iterator[bytes]:
    """The archive anew, all of it belonging to one user and group, in chunks. Raises BadRequestError."""
    with reading(archive) as tar:
        yield from gathered(_owned(tar, user, group))


def _owned(tar: tarfile.TarFile, user: int, group: int) -> Iterator[bytes]:
    for parts, info in members(tar):
        fresh = info_of("/".join(parts), info.type, info.mode & 0o777, info.mtime)
        fresh.uid, fresh.gid = user, group
        if info.isreg():
            fresh.type, fresh.size = tarfile.REGTYPE, info.size
        elif info.issym():
            fresh.linkname = info.linkname
        elif info.islnk():
            fresh.linkname = "/".join(parts_of(info.linkname))
        yield header(fresh)
        if fresh.size:
            with content(tar, info) as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
            yield padding(fresh.size)
    yield bytes(2 * BLOCK_BYTES)


def folders(names: Iterable[str], user: int, group: int) -> bytes:
    """An archive of empty folders."""
    packed = bytearray()
    for name in names:
        info = info_of(name, tarfile.DIRTYPE, 0o755, 0)
        info.uid, info.gid = user, group
        packed += header(info)
    return bytes(packed) + bytes(2 * BLOCK_BYTES)


def file_of(name: str, content: bytes) -> bytes:
    """An archive of one file that everybody may read, and root may write."""
    info = info_of(name, tarfile.REGTYPE, 0o644, 0)
    info.size = len(content)
    return b"".join((header(info), content, padding(len(content)), bytes(2 * BLOCK_BYTES)))


def info_of(name: str, kind: bytes, mode: int, mtime: float) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.mtime = kind, mode, seconds_of(mtime)
    return info


def seconds_of(mtime: float) -> int:
    """A time that every file system takes: archives may say anything, "nan" too."""
    return int(mtime) if 0 <= mtime < 1 << 33 else 0


def header(info: tarfile.TarInfo) -> bytes:
    # GNU's form: names are any bytes of any length, and nothing else is carried along.
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK_BYTES)


def content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(info)
    if file is None:
        raise BadRequestError(f"an archive's member has no content: {info.name[:200]!r}")
    return file


def gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in larger pieces: each is a write to somewhere."""
    waiting = bytearray()
    for piece in pieces:
        waiting += piece
        if len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)
