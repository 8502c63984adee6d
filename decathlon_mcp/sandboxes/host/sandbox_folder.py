"""The folder of a sandbox of this machine: notes of a server for the next server, and its removal."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from decathlon_sandbox.archives import open_accessible

from decathlon_mcp.errors import BadRequestError, ProviderUnavailableError
from decathlon_mcp.sandboxes.host.processes import ProcessId, is_alive

OWNER_FILE = "owner"
"""In a sandbox's folder: the owner of the provider that opened it."""
LEADER_FILE = "leader"
"""In a sandbox's folder: which process is the first one, as `<pid> <started_ticks> <boot id>`."""
GROUPS_FILE = "groups"
"""In a sandbox's folder: the folders of its control group, one a line."""
HELPER_FILE = "network"
"""In a sandbox's folder: which process connects its network, as in `LEADER_FILE`."""
RECORDS = (OWNER_FILE, LEADER_FILE, GROUPS_FILE, HELPER_FILE)
"""Files that the next server needs to find what is left of a sandbox."""
RECORD_BYTES = 16 << 10
"""Limit on such a file; what runs in a sandbox without isolation can replace it."""
MAX_FOLDERS = 1 << 16
"""Entries that are read of a folder of sandboxes: far more than sandboxes that a machine can run."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PATH_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_NO_FOLDER = frozenset({errno.ENOTDIR, errno.ELOOP})


def create_folder(folder: Path, owner: str, subfolders: Sequence[str] = ()) -> None:
    """Create the folder of a sandbox, with folders in it.

    Raises BadRequestError if there is already one, ProviderUnavailableError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with own_folder(folder.parent):
        pass
    # Complete when it gets its name: of a server that is killed meanwhile, the owner of every folder is
    # known.
    new = folder.with_name(unfinished_folder_prefix(owner) + folder.name)
    new.mkdir(mode=0o700)
    (new / OWNER_FILE).write_text(owner, "utf-8")
    for name in subfolders:
        (new / name).mkdir()
    try:
        new.rename(folder)
    except OSError:
        shutil.rmtree(new)
        raise BadRequestError(f"there is already a sandbox named {folder.name}") from None


def unfinished_folder_prefix(owner: str) -> str:
    """How names of folders begin that a server with this owner has not finished creating."""
    return f".{owner}."


def sandbox_owners(folder: Path) -> dict[str, str]:
    """The owner of each sandbox whose folder this user has made in `folder`, by its name.

    An unfinished folder has a name of its own, which says the owner. Raises ProviderUnavailableError. Blocks.
    """
    found: dict[str, str] = {}
    try:
        with own_folder(folder) as parent, os.scandir(parent) as entries:
            for entry in itertools.islice(entries, MAX_FOLDERS):
                if entry.name.startswith("."):
                    found[entry.name] = entry.name[1:].rpartition(".")[0]
                elif (owner := _read_record(parent, entry.name, OWNER_FILE)) is not None:
                    found[entry.name] = owner
    except FileNotFoundError:
        pass  # no sandbox was opened yet
    return found


def living_sandboxes(folder: Path, owner: str) -> dict[str, bool]:
    """The sandboxes of an owner in a folder: whether the first process of each is alive, by name.

    Raises ProviderUnavailableError. Blocks.
    """
    return {
        name: is_alive(read_process(folder / name, LEADER_FILE))
        for name, of in sandbox_owners(folder).items()
        if of == owner
    }


def read_owner(folder: Path) -> str | None:
    """Owner of the sandbox in a folder; None if there is no sandbox."""
    return read_record(folder, OWNER_FILE)


def read_record(folder: Path, name: str) -> str | None:
    """A file that a server has written into a sandbox's folder; None if it is missing, or no server's.

    Raises ProviderUnavailableError.
    """
    try:
        with own_folder(folder.parent) as parent:
            return _read_record(parent, folder.name, name)
    except OSError:
        return None


def _read_record(parent: int, folder: str, name: str) -> str | None:
    # Another server that uses this folder may remove its sandbox meanwhile, and what runs in a sandbox
    # without isolation can put anything in the place of the file.
    try:
        with closing_descriptor(open_accessible(folder, _FOLDER_FLAGS, parent, 0o700)) as own:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with closing_descriptor(os.open(name, flags, dir_fd=own)) as file:
                status = os.fstat(file)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.fstat(own).st_uid == os.geteuid():
                    return os.read(file, RECORD_BYTES).decode("utf-8", "replace")
    except OSError:
        pass
    return None


@contextmanager
def own_folder(folder: Path) -> Generator[int]:
    """A descriptor of a folder in which nobody but this user, or root, can have put anything.

    Raises OSError, ProviderUnavailableError.
    """
    with closing_descriptor(os.open(folder, _FOLDER_FLAGS)) as descriptor:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ProviderUnavailableError(
                f"{folder} must belong to the server's user, and others must not be able to write to it"
            )
        yield descriptor


def write_process(file: Path, process: ProcessId) -> None:
    """Note a process for the next server."""
    boot_id = _BOOT_ID.read_text("utf-8").strip()
    file.write_text(f"{process.pid} {process.started_ticks} {boot_id}", "utf-8")


def read_process(folder: Path, name: str) -> ProcessId | None:
    """The process that a server noted in a sandbox's folder; None if it did not, or in an earlier boot.

    Raises ProviderUnavailableError.
    """
    record = read_record(folder, name)
    try:
        pid, started_ticks, boot_id = (record or "").split()
        process = ProcessId(int(pid), int(started_ticks))
        return process if boot_id == _BOOT_ID.read_text("utf-8").strip() and process.pid > 0 else None
    except (OSError, ValueError):
        return None


@contextmanager
def closing_descriptor(descriptor: int) -> Generator[int]:
    """Close an open file at the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def remove_folder(name: str, parent: int, *, last: Collection[str], keep_last: bool = False) -> None:
    """Remove a folder of this user and everything in it; `last` in it only when everything else is gone.

    `parent`: a descriptor of the folder that it is in. `keep_last`: the folder and `last` in it stay.

    No link is followed, and folders without permissions get them. It needs five descriptors, however deep the
    folders lie. An entry that cannot be removed does not keep the others from it. A missing folder is no
    error. Raises the first OSError. Blocks.
    """
    try:
        top = _open_folder(name, parent)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        os.unlink(name, dir_fd=parent)
        return
    with closing_descriptor(top):
        if os.fstat(top).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "the folder belongs to another user", name)
        removal = _Removal(top)
        removal.run(spared=last)
        if keep_last:
            return
        removal.run()
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=parent)


class _Removal:
    """Empties a folder that what ran in a sandbox has filled. `top`: its descriptor.

    `shutil.rmtree` needs a descriptor and a call for each level, and stops at a folder without permissions.
    """

    # A folder in a folder is moved to the top before it is emptied, so that the depth of any is one.
    def __init__(self, top: int) -> None:
        self._top = top
        self._pending: list[str] = []
        self._prefix = f".{secrets.token_hex(8)}"
        self._moved = 0
        self._error: OSError | None = None

    def run(self, spared: Collection[str] = ()) -> None:
        """Remove every entry but `spared`. Raises the first OSError, after all have been tried."""
        self._empty(self._top, spared)
        while self._pending:
            name = self._pending.pop()
            try:
                with closing_descriptor(_open_folder(name, self._top)) as folder:
                    self._empty(folder)
                os.rmdir(name, dir_fd=self._top)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._error = self._error or error
        if self._error is not None:
            raise self._error

    def _empty(self, folder: int, spared: Collection[str] = ()) -> None:
        for name in os.listdir(folder):
            if name in spared:
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
            with closing_descriptor(os.open(name, _PATH_FLAGS, dir_fd=folder)) as path:
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
