"""Packing a folder of this machine, links as links, and saving an archive of bounded size."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from decathlon_mcp.archives.archive import BLOCK_BYTES, CHUNK_BYTES, gathered, header, info_of, padding
from decathlon_mcp.errors import LimitExceededError

_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def pack(folder: Path, archive: Path, limit_bytes: int, *, below: Path) -> None:
    """Pack a folder as base's `Sandbox.get` says. Raises LimitExceededError past `limit_bytes`.

    One that lies beyond a link somewhere below `below` counts as not there.
    """
    on_the_way = [path for path in (folder, *folder.parents) if path != below and path.is_relative_to(below)]
    linked = any(path.is_symlink() for path in on_the_way)
    save(nothing() if linked else gathered(_packed(folder)), archive, limit_bytes)


def save(chunks: Iterable[bytes], archive: Path, limit_bytes: int) -> None:
    """Write an archive that arrives in chunks. Past `limit_bytes`: LimitExceededError, and nothing stays."""
    written = 0
    try:
        with archive.open("wb") as out:
            for chunk in chunks:
                written += len(chunk)
                _check(written, limit_bytes)
                out.write(chunk)
    except BaseException:
        archive.unlink(missing_ok=True)
        raise


def _check(size: int, limit_bytes: int) -> None:
    if size > limit_bytes:
        raise LimitExceededError(
            f"what is in the sandbox is larger than the {limit_bytes} bytes that may be taken",
            limitBytes=limit_bytes,
        )


def nothing() -> Iterable[bytes]:
    """An archive without members."""
    return (bytes(tarfile.RECORDSIZE),)


def _packed(folder: Path) -> Iterator[bytes]:
    top = os.fspath(folder)
    waiting: list[str] = ["."] if stat.S_ISDIR(_mode(top)) else []
    while waiting:
        name = waiting.pop()
        path = os.path.join(top, name)  # noqa: PTH118  (names are any bytes, and there are many)
        found = os.lstat(path)
        info = info_of(name, tarfile.REGTYPE, stat.S_IMODE(found.st_mode), int(found.st_mtime))
        if stat.S_ISDIR(found.st_mode):
            info.type = tarfile.DIRTYPE
            yield header(info)
            waiting += sorted((f"{name}/{entry}" for entry in os.listdir(path)), reverse=True)  # noqa: PTH208
        elif stat.S_ISLNK(found.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)  # noqa: PTH115
            yield header(info)
        elif stat.S_ISFIFO(found.st_mode):
            info.type = tarfile.FIFOTYPE
            yield header(info)
        elif stat.S_ISREG(found.st_mode):
            yield from _file(path, info)
    yield bytes(2 * BLOCK_BYTES)


def _file(path: str, info: tarfile.TarInfo) -> Iterator[bytes]:
    with os.fdopen(os.open(path, _OLD_FILE), "rb") as file:
        info.size = os.fstat(file.fileno()).st_size
        yield header(info)
        left = info.size
        while left and (chunk := file.read(min(left, CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk
        while left:  # it has shrunk meanwhile
            yield bytes(min(left, CHUNK_BYTES))
            left -= min(left, CHUNK_BYTES)
        yield padding(info.size)


def _mode(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
