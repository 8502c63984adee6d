"""Views of this machine's files in which another user can reach what only root can otherwise.

If the server is root, bubblewrap runs as a user that belongs to nobody, who may not enter /root. The Python
that runs the server may lie there (uv, pyenv), although it is not secret itself. Root's processes can enter
a view, a mount namespace, and see the same files but there: of a folder that others may not enter, only the
wanted folders below are left. The same for a device that only root can open.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from threading import Thread

from decathlon_mcp.errors import ProviderUnavailableError

_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_FOLDER_MODE = 0o755

_libc = ctypes.CDLL(None, use_errno=True)


def view_launcher(folders: Sequence[Path]) -> tuple[str, ...]:
    """A command line that executes the rest of it where everybody can reach these folders.

    Empty if everybody can anyway, or if the server is not root. Raises ProviderUnavailableError.
    """
    if os.geteuid() != 0:
        return ()
    closed = {folder: above for folder in folders if (above := closed_parent(folder)) is not None}
    if not closed:
        return ()
    try:
        return _launcher(_view_of_folders(tuple(closed.items())))
    except OSError as error:
        raise ProviderUnavailableError(
            f"{folders[0]}, where the server's Python is, can be reached by root alone, and root may not "
            f"create a mount namespace here: {error.strerror}"
        ) from error


def device_launcher(device: Path) -> tuple[str, ...]:
    """A command line that executes the rest of it where everybody can read and write a device.

    Its folder has nothing else there. Empty if everybody can anyway, or if the server is not root. Raises
    ProviderUnavailableError.
    """
    if os.geteuid() != 0 or device.stat().st_mode & 0o006 == 0o006:
        return ()
    try:
        return _launcher(_view_of_device(device))
    except OSError as error:
        raise ProviderUnavailableError(
            f"only root can open {device}, and root may not create a mount namespace here: {error.strerror}"
        ) from error


def _launcher(view: int) -> tuple[str, ...]:
    return "nsenter", f"--mount=/proc/{os.getpid()}/fd/{view}", "--"


def closed_parent(folder: Path) -> Path | None:
    """The topmost folder above that other users may not enter."""
    for above in reversed(folder.parents):
        if not above.stat().st_mode & stat.S_IXOTH:
            return above
    return None


@cache
def _view_of_folders(closed: tuple[tuple[Path, Path], ...]) -> int:
    """`closed`: folders to be reached, each with the one above that is closed."""
    return _create_view(lambda: _open_folders(closed))


@cache
def _view_of_device(device: Path) -> int:
    number = device.stat().st_rdev

    def replace() -> None:
        _mount("tmpfs", str(device.parent), "tmpfs", 0, f"mode={_FOLDER_MODE:o},size=64k")
        os.mknod(device, stat.S_IFCHR, number)
        device.chmod(0o666)

    return _create_view(replace)


def _create_view(change: Callable[[], None]) -> int:
    """A descriptor of a mount namespace, open as long as the server runs, after a change there.

    Raises OSError.
    """
    result: list[int | OSError] = []

    def create() -> None:
        try:
            _check(_libc.unshare(_CLONE_NEWNS))
            _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
            change()
            result.append(os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            result.append(error)

    # In a thread that ends afterwards: a thread has a mount namespace of its own.
    thread = Thread(target=create)
    thread.start()
    thread.join()
    view = result[0]
    if isinstance(view, OSError):
        raise view
    return view


def _open_folders(closed: Sequence[tuple[Path, Path]]) -> None:
    wanted = [(os.open(folder, os.O_PATH | os.O_CLOEXEC), folder) for folder, _ in closed]
    try:
        for above in {above for _, above in closed}:
            _mount("tmpfs", str(above), "tmpfs", 0, f"mode={_FOLDER_MODE:o},size=64k")
        for descriptor, folder in wanted:
            for parent in (*reversed(folder.parents), folder):
                if not parent.exists():
                    parent.mkdir()
                    parent.chmod(_FOLDER_MODE)
            _mount(f"/proc/self/fd/{descriptor}", str(folder), None, _MS_BIND | _MS_REC)
    finally:
        for descriptor, _ in wanted:
            os.close(descriptor)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    _check(_libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
