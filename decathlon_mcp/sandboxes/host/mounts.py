"""The mounts of a sandbox's root file system, as arguments of bubblewrap, and the users that reach its files.

If the server is root, bubblewrap runs as a user that belongs to nobody, who may not enter /root. The Python
that runs the server may lie there (uv, pyenv), although it is not secret itself. Root's processes can enter
a view, a mount namespace, and see the same files but there: of a folder that others may not enter, only the
wanted folders below are left. The same for a device that only root can open.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Protocol

from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.sandboxes.base import SCRATCH, Limits

PASSWD, GROUP = "/etc/passwd", "/etc/group"
TABLE_BYTES = 1 << 20
"""How much of a table is read."""
_ID_DIGITS = 10
"""Ids are 32-bit numbers."""


@dataclass(frozen=True, slots=True)
class SandboxUser:
    """The user that processes run as, inside. `home` is absolute."""

    user: int = 0
    group: int = 0
    home: PurePosixPath = field(default=PurePosixPath("/root"))


def find_user(text: str, passwd: bytes, group: bytes) -> SandboxUser:
    """What an image's USER means: a name or an id, optionally with a group. Unknown names are root.

    `passwd` and `group`: the first `TABLE_BYTES` of each table, empty if there is none.
    """
    name, _, group_name = text.partition(":")
    row = _find(_rows(passwd), name or "0")
    user_id = int(name) if _is_id(name) else int(row[2])
    group_id = int(row[3]) if _is_id(row[3]) else 0
    if group_name:
        group_id = int(group_name) if _is_id(group_name) else int(_find(_rows(group), group_name)[2])
    home = PurePosixPath(row[5] if len(row) > 5 else "")
    if not home.is_absolute() or ".." in home.parts or len(home.parts) < 2:
        home = PurePosixPath("/root" if user_id == 0 else "/home/user")
    return SandboxUser(user_id, group_id, home)


def _find(rows: Sequence[Sequence[str]], name_or_id: str) -> Sequence[str]:
    """The first row with that name, else the first with that id; root's ids if there is none."""
    for column in (0, 2):
        for row in rows:
            if row[column] == name_or_id:
                return row
    return ("", "", "0", "0")


def _rows(table: bytes) -> list[list[str]]:
    """Valid lines of a table, split at colons."""
    rows = [line.split(":") for line in table.decode("utf-8", "replace").splitlines()]
    return [row for row in rows if len(row) >= 4 and _is_id(row[2])]


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _ID_DIGITS


VOLATILE = (PurePosixPath("/run"), PurePosixPath("/var/tmp"))
"""Folders besides /tmp whose content no program expects to last. What the image has there is hidden."""
DEFAULT_MEMORY_MIB = 4096
"""What folders may hold together is derived from this, where a sandbox's memory has no limit."""
HOSTS = b"127.0.0.1\tlocalhost\n::1\tlocalhost\n"


@dataclass(frozen=True, slots=True)
class WritableFolder:
    """A file system in memory, at an absolute path inside. Its contents count as the sandbox's memory."""

    path: PurePosixPath
    size_bytes: int
    mode: int


@dataclass(slots=True)
class CopiedFiles:
    """Files whose content is copied into a sandbox. `stack` closes their descriptors."""

    stack: ExitStack
    descriptors: list[int] = field(default_factory=list[int])

    def add_content(self, content: bytes) -> str:
        """As `add`, for a new file with this content."""
        return self.add(file_with(content))

    def add(self, descriptor: int) -> str:
        """Take over an open file; returns how an argument names it."""
        self.stack.callback(os.close, descriptor)
        self.descriptors.append(descriptor)
        return str(descriptor)


class RootFiles(Protocol):
    """The files that a sandbox starts with, all of them read-only."""

    @property
    def user(self) -> SandboxUser: ...

    @property
    def owner(self) -> tuple[int, int]:
        """User and group, on this machine, that own the files."""
        ...

    @property
    def reached(self) -> tuple[Path, ...]:
        """Folders of this machine that the sandbox's user must be able to enter."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of the first process, without HOME."""
        ...

    @property
    def digest(self) -> str | None:
        """The image's digest, `sha256:...`; None without an image."""
        ...

    @property
    def location(self) -> Path | None:
        """The folder with the files; None if they are this machine's own."""
        ...

    def find_program(self, name: str) -> Path | None:
        """The file that a program's name means inside; None if there is none that can be executed."""
        ...

    def real_path(self, path: PurePosixPath) -> PurePosixPath:
        """The path without links: a mount must not follow them."""
        ...

    def first_mounts(self, mounts: Sequence[PurePosixPath], copied: CopiedFiles) -> Iterator[str]:
        """The files, with room for these mounts."""
        ...

    def mounts_in(self, folder: WritableFolder, copied: CopiedFiles) -> Iterator[str]:
        """The files in a folder that is writable and has just been mounted."""
        ...


def writable_folders(files: RootFiles, root: PurePosixPath, limits: Limits) -> list[WritableFolder]:
    """The suite's root, the user's home and folders for what does not last; outer folders come first.

    Together they hold less than the sandbox's memory, so that full folders alone do not end it.
    """
    memory = (limits.memory_mib or DEFAULT_MEMORY_MIB) << 20
    scratch = min(limits.scratch_mib << 20, memory // 8)
    home = files.user.home
    folders = [WritableFolder(root, memory // 2, 0o755), WritableFolder(SCRATCH, scratch, 0o1777)]
    folders += [WritableFolder(path, memory // 32, 0o1777) for path in VOLATILE if path != root]
    if not home.is_relative_to(root) and not home.is_relative_to(SCRATCH):
        folders.append(WritableFolder(home, memory // 8, 0o700))
    placed = [
        WritableFolder(files.real_path(folder.path), folder.size_bytes, folder.mode) for folder in folders
    ]
    return sorted(placed, key=lambda folder: len(folder.path.parts))


def file_with(content: bytes) -> int:
    """A descriptor of a file without a name, to be read from its beginning."""
    descriptor = os.memfd_create("decathlon", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def memory_mount(folder: WritableFolder) -> list[str]:
    size, mode = str(folder.size_bytes), f"{folder.mode:04o}"
    return ["--perms", mode, "--size", size, "--tmpfs", str(folder.path)]


def folder_entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, sorted; nothing if it is missing."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def bind(path: Path, inside: PurePosixPath) -> Iterator[str]:
    """The same file, folder or link inside; nothing for others."""
    if path.is_symlink():
        yield from ("--symlink", str(path.readlink()), str(inside))
    elif path.is_dir() or path.is_file():
        yield from ("--ro-bind", str(path), str(inside))


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
    """`closed`: folders to be reached, each with its closed parent."""
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
