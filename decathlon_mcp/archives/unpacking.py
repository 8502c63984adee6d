"""Unpacking an archive on this machine without ever writing through a link."""

from __future__ import annotations

import errno
import os
import tarfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from decathlon_mcp.archives.archive import CHUNK_BYTES, Parts, content, members, parts_of, reading, seconds_of
from decathlon_mcp.errors import BadRequestError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FAULTS_OF_THE_ARCHIVE = frozenset(
    {errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT}
)


def unpack(archive: Path | bytes, folder: Path, *, below: Path) -> None:
    """Unpack into `folder`, which lies at or below the existing `below`, never writing through a link.

    Raises BadRequestError for an archive that cannot be unpacked so.
    """
    with reading(archive) as tar, _Ground(below) as ground:
        start = folder.relative_to(below).parts
        with _faults_of_the_archive(str(folder)):
            ground.enter(start)
        for parts, info in members(tar):
            with _faults_of_the_archive(info.name):
                _unpack(tar, info, ground, start + parts, start)


@contextmanager
def _faults_of_the_archive(name: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FAULTS_OF_THE_ARCHIVE:
            raise
        raise BadRequestError(f"cannot unpack {name[:200]!r}: {error.strerror}") from error


def _unpack(tar: tarfile.TarFile, info: tarfile.TarInfo, ground: _Ground, parts: Parts, start: Parts) -> None:
    if info.isdir():
        os.fchmod(ground.enter(parts), (info.mode & 0o777) | 0o700)
        return
    parent, name = ground.enter(parts[:-1]), parts[-1]
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
    if info.issym():
        os.symlink(info.linkname, name, dir_fd=parent)
    elif info.islnk():
        *above, last = start + parts_of(info.linkname)
        source = os.dup(ground.enter(tuple(above)))
        try:
            os.link(last, name, src_dir_fd=source, dst_dir_fd=ground.enter(parts[:-1]), follow_symlinks=False)
        finally:
            os.close(source)
    else:
        number = os.open(name, _NEW_FILE, 0o600, dir_fd=parent)
        with os.fdopen(number, "wb") as out, content(tar, info) as file:
            while chunk := file.read(CHUNK_BYTES):
                out.write(chunk)
            out.flush()
            os.fchmod(out.fileno(), info.mode & 0o777)
            mtime = seconds_of(info.mtime)
            os.utime(out.fileno(), (mtime, mtime))


class _Ground:
    """A folder to unpack into, walked by descriptors so that no link on the way is followed."""

    def __init__(self, base: Path) -> None:
        self._base = os.open(base, _DIRECTORY)
        self._parts: Parts = ()
        self._here = os.dup(self._base)

    def __enter__(self) -> _Ground:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._here)
        os.close(self._base)

    def enter(self, parts: Parts) -> int:
        """A descriptor of that folder, made if missing; valid until the next call."""
        if parts != self._parts:
            here = os.dup(self._base)
            try:
                for part in parts:
                    here = _step(here, part)
            except OSError:
                os.close(here)
                raise
            os.close(self._here)
            self._here, self._parts = here, parts
        return self._here


def _step(here: int, part: str) -> int:
    try:
        below = os.open(part, _DIRECTORY, dir_fd=here)
    except FileNotFoundError:
        os.mkdir(part, 0o755, dir_fd=here)
        below = os.open(part, _DIRECTORY, dir_fd=here)
    os.close(here)
    return below
