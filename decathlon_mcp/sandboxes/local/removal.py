"""Removes a folder that what ran in a sandbox has filled, with the permissions of this server's user.

`shutil.rmtree` needs a descriptor and a call for each level, and stops at a folder without permissions.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from decathlon_mcp.archives.folder_cursor import open_accessible

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PATH_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_NO_FOLDER = frozenset({errno.ENOTDIR, errno.ELOOP})


def remove_folder(folder: Path, *, last: str) -> None:
    """Remove a folder and everything in it; `last` in it only when everything else is gone.

    No link is followed, and folders without permissions get them. It needs five descriptors, however deep the
    folders lie. An entry that cannot be removed does not keep the others from it. A missing folder is no
    error. Raises the first OSError. Blocks.
    """
    with _opened(os.open(folder.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as parent:
        try:
            top = _open_folder(folder.name, parent)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in _NO_FOLDER:
                raise
            os.unlink(folder.name, dir_fd=parent)
            return
        with _opened(top):
            removal = _Removal(top)
            removal.run(spared=last)
            removal.run()
        with suppress(FileNotFoundError):
            os.rmdir(folder.name, dir_fd=parent)


class _Removal:
    """Empties a folder, of which `top` is a descriptor."""

    # A folder in a folder is moved to the top before it is emptied, so that the depth of any is one.
    def __init__(self, top: int) -> None:
        self._top = top
        self._pending: list[str] = []
        self._prefix = f".{secrets.token_hex(8)}"
        self._moved = 0
        self._error: OSError | None = None

    def run(self, spared: str | None = None) -> None:
        """Remove every entry but `spared`. Raises the first OSError, after all have been tried."""
        self._empty(self._top, spared)
        while self._pending:
            name = self._pending.pop()
            try:
                with _opened(_open_folder(name, self._top)) as folder:
                    self._empty(folder)
                os.rmdir(name, dir_fd=self._top)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._error = self._error or error
        if self._error is not None:
            raise self._error

    def _empty(self, folder: int, spared: str | None = None) -> None:
        for name in os.listdir(folder):
            if name == spared:
                continue
            try:
                self._remove(name, folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._error = self._error or error

    def _remove(self, name: str, folder: int) -> None:
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
            return
        try:
            os.rmdir(name, dir_fd=folder)
        except OSError as error:
            if error.errno not in _NOT_EMPTY:
                raise
            self._pending.append(name if folder == self._top else self._move_to_top(name, folder))

    def _move_to_top(self, name: str, folder: int) -> str:
        """Move a folder to the top; returns its name there."""
        self._moved += 1
        target = f"{self._prefix}-{self._moved}"
        try:
            os.rename(name, target, src_dir_fd=folder, dst_dir_fd=self._top)
        except PermissionError:
            # It contains `..`, which changes.
            with _opened(os.open(name, _PATH_FLAGS, dir_fd=folder)) as path:
                os.chmod(f"/proc/self/fd/{path}", 0o700)  # noqa: PTH101  (fchmod(2) refuses such a one)
            os.rename(name, target, src_dir_fd=folder, dst_dir_fd=self._top)
        return target


def _open_folder(name: str, folder: int) -> int:
    """Open a folder in a folder, with the permissions to list and to change it. Raises OSError."""
    descriptor = open_accessible(name, _FOLDER_FLAGS, folder, 0o700)
    try:
        if os.fstat(descriptor).st_mode & 0o700 != 0o700:
            os.fchmod(descriptor, 0o700)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _opened(descriptor: int) -> Generator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
