"""Files and folders that appear when they are complete, and replace others only if that was asked for."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from decathlon_mcp.errors import BadRequestError

PARTIAL, OLD = ".partial", ".old"
"""Endings of the hidden names of a folder that is being written, and of one that is being replaced."""


@contextmanager
def new_file(out: Path, *, force: bool) -> Generator[BinaryIO]:
    """A file that becomes `out` at the end of the context; after an error nothing is left.

    Raises BadRequestError if `out` exists, unless `force` replaces it, or if it is a folder.
    """
    if out.is_dir():
        raise BadRequestError(f"{out} is a folder; name a file")
    _refuse_existing(out, force=force)
    with _unnamed_file(out) as file:
        yield file
        file.flush()
        _refuse_existing(out, force=force)
        named = _beside(out)
        try:
            # With any descriptor, which an absolute path ignores, os.link follows the link in /proc.
            os.link(f"/proc/self/fd/{file.fileno()}", named, src_dir_fd=file.fileno())
            os.replace(named, out)  # noqa: PTH105  (documented as atomic)
        finally:
            named.unlink(missing_ok=True)


@contextmanager
def _unnamed_file(out: Path) -> Generator[BinaryIO]:
    """A file beside without a name, of which nothing is left if the process is killed."""
    try:
        descriptor = os.open(out.absolute().parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        # This file system (NFS, some of FUSE) has no files without a name.
        partial = _beside(out)
        try:
            with partial.open("x+b") as file:
                yield file
        finally:
            partial.unlink(missing_ok=True)
    else:
        with os.fdopen(descriptor, "w+b") as file:
            yield file


@contextmanager
def new_folder(out: Path, *, holds: str, force: bool) -> Generator[Path]:
    """A folder that becomes `out` at the end of the context; after an error nothing is left.

    `holds`: pattern of an export's files, such as `*.parquet` or `*/task.toml`. Raises BadRequestError if
    `out` exists, unless `force` replaces it. Even then only a folder with such files alone, or with folders
    that have one each: any other is no earlier export.
    """
    if out.exists() and not out.is_dir():
        raise BadRequestError(f"{out} is a file; name a folder")
    _refuse_existing(out, force=force)
    if out.exists():
        expected = {file.relative_to(out).parts[0] for file in out.glob(holds) if file.is_file()}
        if any(file.name not in expected for file in out.iterdir()):
            raise BadRequestError(
                f"{out} has other files than {holds}; --force replaces only an earlier export"
            )
    _remove_unfinished(out)
    partial, old = _beside(out), _beside(out, OLD)
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield partial
        _refuse_existing(out, force=force)
        if out.exists():
            # A folder cannot be replaced in one step: for a moment there is none.
            out.rename(old)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
        shutil.rmtree(old, ignore_errors=True)
        os.close(lock)


def _remove_unfinished(out: Path) -> None:
    """Remove what an export to this folder left that was killed: nobody has its lock."""
    for partial in out.absolute().parent.glob(f".{glob.escape(out.absolute().name)}.????????{PARTIAL}"):
        with suppress(OSError):
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)
            finally:
                os.close(lock)


def _refuse_existing(out: Path, *, force: bool) -> None:
    if out.exists() and not force:
        raise BadRequestError(f"{out} exists; --force replaces it")


def _beside(out: Path, ending: str = PARTIAL) -> Path:
    return out.absolute().parent / f".{out.absolute().name}.{secrets.token_hex(4)}{ending}"
