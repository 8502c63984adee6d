"""The state folder and its instance locks.

Each running server holds a lock on a file named like the label of its sandboxes. A file without a lock
belongs to a server that died. The next server that can remove its sandboxes takes the lock over, removes
them and then the file. While it holds that lock, no other server does the same work.

Clients wait until their killed server is started again at its address. So a server with another address does
not take it over before its sandboxes have waited for their time, nor does anyone while its supervisor runs
(`Successor`).

Decided 2026-11-22: a file gets its name only after it is locked. A file that was created under its name first
and then locked looked dead for a moment, to every server that started in that moment.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from decathlon_sandbox.processes import read_process

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.storage.disk import cure_of, open_regular, read_kernel_file

MAX_DEAD_SERVERS = 64
"""Dead servers that one start takes over; each costs an open file. The next start takes the others."""
DRAFT_SECONDS = 3600.0
"""Age at which a file that never got its name is removed: its server died between two system calls."""
RECORD_BYTES = 4096
"""Longest record that is read; a server writes about 150 bytes."""
ALIVE_SECONDS = 60.0
"""How often a running server must call `InstanceLock.mark_alive`."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""What flock(2) answers on a file system without locks."""


SUBFOLDERS = ("episodes", "scratch")


def create_state_folder(state: Path) -> None:
    """Create the folder and its subfolders, accessible to their owner alone.

    Raises SettingsError if that is not possible, e.g. on a read-only file system.
    """
    # The names of folders in `episodes` are handles, which are capabilities: only the owner may list them.
    for folder in (state, *(state / name for name in SUBFOLDERS)):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        except OSError as error:
            raise SettingsError(
                f"--state: {folder} cannot be used: {error.strerror}; {cure_of(error)}"
            ) from None


def check_state_folder(state: Path) -> None:
    """Raises SettingsError if the path cannot be a state folder; it need not exist."""
    try:
        is_usable = state.is_dir() or not state.exists()
    except OSError as error:
        raise SettingsError(f"--state: {state} cannot be read: {error.strerror}") from None
    if not is_usable:
        raise SettingsError(f"--state: {state} is not a folder; name the state folder of a server")


@dataclass(frozen=True, slots=True)
class Successor:
    """Which server continues the episodes of one that died, because the clients wait for it.

    `supervisor` and `supervisor_ticks`: id and start of the process that starts it again. `address`: the
    server's URL, or host and port, if it is the same at every start. `wait_seconds`: how long the sandboxes
    wait.
    """

    supervisor: int | None = None
    supervisor_ticks: int | None = None
    address: str | None = None
    wait_seconds: float = 0.0

    @classmethod
    def of_this_process(cls, supervisor: int | None, address: str | None, wait_seconds: float) -> Successor:
        """`supervisor`: the process that starts this one again; None if there is none."""
        return cls(supervisor, _started_ticks(supervisor), address, wait_seconds)

    def is_supervised(self) -> bool:
        """Whether its supervisor runs now, on this machine since its last boot."""
        return self.supervisor_ticks is not None and self.supervisor_ticks == _started_ticks(self.supervisor)

    def is_awaited(self, by: Successor | None, silent_seconds: float) -> bool:
        """Whether a start `by` that server must leave the episodes to this one; None: a start of no server.

        `silent_seconds`: time since the server died, or last wrote that it was alive.
        """
        if self.is_supervised():
            return by is None or (by.supervisor, by.supervisor_ticks) != (
                self.supervisor,
                self.supervisor_ticks,
            )
        if by is None or self.address in (None, by.address):
            return False
        # A time in the future is that of a clock that was set back.
        return 0 <= silent_seconds < self.wait_seconds + ALIVE_SECONDS


@dataclass(frozen=True, slots=True)
class _Record:
    """What a server writes into its file.

    `boot` identifies the running kernel and `host` the machine. `providers`: the names of its providers. All
    three are None in a file that was not written completely. `survives`: its episodes can be continued, by
    `successor`.
    """

    boot: str | None = None
    host: str | None = None
    providers: tuple[str, ...] | None = None
    survives: bool = False
    successor: Successor | None = None

    @classmethod
    def of_this_server(
        cls, providers: Collection[str], *, survives: bool, successor: Successor | None
    ) -> _Record:
        try:
            boot = _BOOT_ID.read_text("ascii").strip()
        except OSError:
            boot = None
        return cls(boot, socket.gethostname(), tuple(sorted(providers)), survives, successor)

    @classmethod
    def parse(cls, encoded: bytes) -> _Record:
        """A record; an empty one for anything that is none."""
        try:
            return msgspec.json.decode(encoded, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return cls()

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def can_sweep(self, other: _Record) -> bool:
        """Whether a server with this record may remove what the dead server `other` left behind."""
        # On a network file system, locks can be local to each machine: then a server that runs on another
        # one looks dead. A changed boot id alone is a restart of the same machine.
        if other.host not in (None, self.host) and other.boot != self.boot:
            return False
        # The next server with a store continues its episodes.
        if other.survives and not self.survives:
            return False
        # A provider that this server does not have could not be swept, and would be forgotten.
        return other.providers is None or set(other.providers) <= set(self.providers or ())


@dataclass(frozen=True, slots=True)
class InstanceLock:
    """The name of a running server, and the dead servers that it has taken over.

    `dead`: names of servers whose sandboxes this server must remove; it then calls `forget`. Those that it
    does not forget are found again by the next server. `awaited`: dead servers that were left to their own
    successors.
    """

    name: str
    _folder: Path
    _descriptor: int
    _taken: dict[str, int] = field(repr=False)
    awaited: dict[str, Successor] = field(default_factory=dict[str, Successor])

    @property
    def dead(self) -> list[str]:
        return sorted(self._taken)

    def names(self) -> set[str]:
        """The names of all servers that have a file now."""
        return {file.name for file in _named_files(self._folder)}

    def mark_alive(self) -> None:
        """Note the time in the files of this server and of those that it has taken over."""
        for descriptor in (self._descriptor, *self._taken.values()):
            os.utime(descriptor)

    def forget(self, name: str) -> None:
        """Remove the file of a dead server, once its sandboxes are removed."""
        descriptor = self._taken.pop(name)
        (self._folder / name).unlink(missing_ok=True)
        os.close(descriptor)


def server_processes(state: Path) -> dict[str, int | None]:
    """The process of each server that has a file; None for a server that died.

    The servers of other machines and PID namespaces look dead: this is for people, and not for deciding what
    may be removed.
    """
    # Read from /proc/locks: to try the locks would keep a server that starts in that moment from taking over
    # the dead ones.
    try:
        locks = read_kernel_file(Path("/proc/locks"))
        files = list(os.scandir(state / "servers"))
    except OSError:
        return {}
    # "1: FLOCK ADVISORY WRITE 4711 08:01:131 0 EOF". Not compared by device, which overlay file systems
    # number differently there.
    lines = [line.split() for line in locks.splitlines()]
    holders = {
        int(line[5].rpartition(":")[2]): int(line[4])
        for line in lines
        if len(line) > 5 and line[1] == "FLOCK" and line[3] == "WRITE"
    }
    return {file.name: holders.get(file.inode()) for file in files if not file.name.startswith(".")}


@contextmanager
def instance_lock(
    state: Path,
    providers: Collection[str] = (),
    *,
    survives: bool = False,
    successor: Successor | None = None,
    leave: Collection[str] = (),
) -> Generator[InstanceLock]:
    """Hold the lock of a new server, whose providers have these names, until the context exits.

    `survives`: the server has a store, and continues the episodes of servers that had one. `successor`: who
    continues its own; None if it has none, and only removes those of others. `leave`: names of servers that
    are not taken over, even if they are dead.

    Raises SettingsError if the state folder is not writable or its file system has no locks.
    """
    folder = state / "servers"
    record = _Record.of_this_server(providers, survives=survives, successor=successor)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name, descriptor = _create_locked(folder, record)
    except OSError as error:
        raise _unusable(folder, error) from None
    taken: dict[str, int] = {}
    awaited: dict[str, Successor] = {}
    try:
        try:
            for file in _named_files(folder):
                if len(taken) == MAX_DEAD_SERVERS:
                    break
                if file.name in (name, *leave):
                    continue
                dead = _take_over(file, record)
                if isinstance(dead, Successor):
                    awaited[file.name] = dead
                elif dead is not None:
                    taken[file.name] = dead
        except OSError as error:
            raise _unusable(folder, error) from None
        yield InstanceLock(name, folder, descriptor, taken, awaited)
    finally:
        for dead in taken.values():
            os.close(dead)
        # Removed before it is unlocked: a file without a lock would be that of a dead server.
        (folder / name).unlink(missing_ok=True)
        os.close(descriptor)


def noted_providers(state: Path) -> set[str]:
    """The names of the providers of all servers that have a file, running or dead. Blocks.

    Raises SettingsError if the folder cannot be read.
    """
    folder = state / "servers"
    found: set[str] = set()
    try:
        for file in _named_files(folder) if folder.is_dir() else ():
            with suppress(FileNotFoundError, PermissionError), open_regular(file) as content:
                found.update(_Record.parse(content.read(RECORD_BYTES)).providers or ())
    except OSError as error:
        raise _unusable(folder, error) from None
    return found


def count_running_servers(state: Path) -> int:
    """The number of servers that hold a lock in this state folder now.

    Raises SettingsError if the folder cannot be read.
    """
    folder = state / "servers"
    try:
        return sum(map(_is_locked, _named_files(folder))) if folder.is_dir() else 0
    except OSError as error:
        raise _unusable(folder, error) from None


def _is_locked(file: Path) -> bool:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False  # it ended meanwhile
    try:
        # Shared, so that two processes that look at the same time do not take each other for a server.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _create_locked(folder: Path, record: _Record) -> tuple[str, int]:
    """Create the file of a new server under a temporary name, lock it, then give it its name."""
    while True:
        name = secrets.token_hex(6)
        draft = folder / f".{name}"
        descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, record.encode())
            draft.rename(folder / name)
        except FileNotFoundError:
            # Another server took this one's draft for old; this process was stopped for that long.
            os.close(descriptor)
        except BaseException:
            draft.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        else:
            return name, descriptor


def _named_files(folder: Path) -> Iterator[Path]:
    """The files of servers, sorted by name. Removes old drafts."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        try:
            if not entry.name.startswith("."):
                if entry.is_file(follow_symlinks=False):
                    yield folder / entry.name
            elif time.time() - entry.stat(follow_symlinks=False).st_mtime > DRAFT_SECONDS:
                (folder / entry.name).unlink(missing_ok=True)
        except FileNotFoundError:
            continue  # its server ended, or named it


def _take_over(file: Path, own: _Record) -> int | Successor | None:
    """Lock the file of a dead server and return its descriptor.

    Returns the server's successor if that is waited for, None if this server must leave it alone otherwise.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, PermissionError):
        return None  # it ended meanwhile, or belongs to another user
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        dead = _Record.parse(os.pread(descriptor, RECORD_BYTES, 0))
        # A server that ended by itself removed its file after it was opened here.
        if not os.path.samestat(status, file.stat()) or not own.can_sweep(dead):
            return None
        silent_seconds = time.time() - status.st_mtime
        if dead.successor is not None and dead.successor.is_awaited(own.successor, silent_seconds):
            return dead.successor
        if own.successor is not None:
            # Its sandboxes are this server's now: if this one dies too, they wait for the same successor.
            # Never shorter than before, so that a kill between two system calls leaves no broken record.
            record = replace(dead, successor=own.successor).encode()
            os.pwrite(descriptor, record.ljust(status.st_size), 0)
        taken, descriptor = descriptor, -1
    except (BlockingIOError, FileNotFoundError):
        return None
    else:
        return taken
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _started_ticks(process: int | None) -> int | None:
    """When a process started, in clock ticks since the boot; None if it has ended."""
    found = None if process is None else read_process(process)
    return None if found is None or found.ended else found.started_ticks


def _unusable(folder: Path, error: OSError) -> SettingsError:
    if error.errno in _NO_LOCKS:
        return SettingsError(
            f"--state: the file system of {folder} has no file locks ({error.strerror}), by which servers "
            "recognise each other: choose a folder on a local disk"
        )
    return SettingsError(f"--state: {folder} cannot be used: {error.strerror}; {cure_of(error)}")
