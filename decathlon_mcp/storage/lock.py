"""The state folder, and the locks of the servers that use it.

Each server holds a lock on a file in `servers`, named like the label of its sandboxes. A file without a lock
belongs to a server that died. The next server that can remove its sandboxes takes the lock over, removes them
and then the file.

One `serve` at a time has a state folder, and continues its predecessor's episodes. `stdio`, embedded servers
and `regrade` use the folder beside it, in any number, and only remove what others of their kind left.

Files appear and go while `servers.lock` is locked, for microseconds, so that no server is taken for dead that
has not locked its file yet.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
from collections.abc import Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
from decathlon_sandbox.process_table import read_process

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.settings import default_state
from decathlon_mcp.storage.disk import cure_of
from decathlon_mcp.telemetry.logs import fields

SETTLE_SECONDS = 5.0
"""How long a second `serve` waits for a first that does not stop: a signal may be on its way to the first."""
RETRY_SECONDS = 0.1
MAX_DEAD_SERVERS = 64
"""Dead servers that one start takes over; each costs an open file. The next start takes the others."""
MAX_RECORD_BYTES = 4096
"""Longest record that is read; a server writes about 150 bytes."""
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""What flock(2) answers on a file system without locks."""

log = logging.getLogger("decathlon.storage")


def create_state_folder(state: Path) -> None:
    """Create the folder and its subfolders, accessible to their owner alone.

    Raises SettingsError if that is not possible, e.g. on a read-only file system.
    """
    # The names of folders in `episodes` are handles, which are capabilities: only the owner may list them.
    for folder in (state, state / "episodes", state / "scratch"):
        with _errors_named(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)


def check_state_folder(state: Path, option: str = "--state") -> None:
    """Check a state folder before a command reads it. `option`: what names the folder.

    Raises SettingsError if it is not a folder, or if it does not exist and is not the default one, in which
    just no server has run yet.
    """
    try:
        exists = state.exists()
        problem = "is not a folder" if exists and not state.is_dir() else ""
    except OSError as error:
        raise SettingsError(f"{option}: {state} cannot be read: {error.strerror}") from None
    if not exists and state.absolute() != default_state().absolute():
        problem = "does not exist"
    if problem:
        raise SettingsError(f"{option}: {state} {problem}; name the state folder of a server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What a server writes into its file; a file that was not written completely has the defaults."""

    pid: int = 0
    providers: tuple[str, ...] | None = None
    """The names of its providers."""
    serves: bool = False
    """It is a `serve`, so that no other `serve` may run on the state folder."""
    survives: bool = False
    """The next `serve` continues its episodes."""
    stops: bool = False
    """It is stopping, so that another `serve` may wait for its end."""
    supervisor: int | None = None
    """The process that starts this server again when it has died."""
    supervisor_ticks: int | None = None
    """When that process started, in clock ticks since the boot."""

    @classmethod
    def read(cls, content: bytes) -> Server:
        try:
            return msgspec.json.decode(content, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return cls()

    @classmethod
    def of_this_process(cls, providers: Collection[str] = (), **members: Any) -> Server:
        """The record of a server in this process."""
        ticks = _started_ticks(members.get("supervisor"))
        names = tuple(sorted(providers))
        return cls(pid=os.getpid(), providers=names, supervisor_ticks=ticks, **members)

    def is_restarted_for(self, other: Server) -> bool:
        """Whether this server, which died, is started again by a supervisor that `other` does not have."""
        ticks = _started_ticks(self.supervisor)
        return self.supervisor != other.supervisor and ticks is not None and ticks == self.supervisor_ticks

    def can_sweep(self, dead: Server) -> bool:
        """Whether this server may remove what a dead server has left behind."""
        # A provider that this server does not have could not be swept, and would be forgotten.
        return (self.survives or not dead.survives) and (
            dead.providers is None or set(dead.providers) <= set(self.providers or ())
        )


class ServerFile(NamedTuple):
    """What the file of a server says, and whether that server runs."""

    name: str
    server: Server
    runs: bool


@dataclass(frozen=True, slots=True)
class InstanceLock:
    """The name of a running server, and the dead servers that it has taken over.

    A server removes the sandboxes of servers in `dead`, and then calls `forget`. The next server finds
    servers that were not forgotten.
    """

    name: str
    _server: Server
    _folder: Path
    _descriptor: int
    _taken: dict[str, int]

    @property
    def dead(self) -> list[str]:
        return sorted(self._taken)

    def others(self) -> set[str]:
        """The names of all servers that have a file now, except this server and dead servers it has taken."""
        return {file.name for file in _files(self._folder)} - {self.name, *self._taken}

    def forget(self, name: str) -> None:
        """Remove the file of a dead server, once its sandboxes are removed."""
        _remove(self._folder / name, self._taken.pop(name))

    def note_stop(self) -> None:
        """Note that this server is stopping."""
        with suppress(OSError):
            record = msgspec.json.encode(replace(self._server, stops=True))
            # At once, and never shorter than before: a reader finds a whole record.
            os.pwrite(self._descriptor, record.ljust(os.fstat(self._descriptor).st_size), 0)


@contextmanager
def instance_lock(state: Path, server: Server, *, leave: Collection[str] = ()) -> Generator[InstanceLock]:
    """Hold the lock of a new server until the context exits.

    `leave`: names of servers that are not taken over, even if they are dead.

    Raises SettingsError if it is a `serve` and another `serve` has the folder, and if the state folder is not
    writable or its file system has no locks.
    """
    folder = state / "servers"
    with _errors_named(folder), _locked(folder):
        if server.serves and (other := serving(state, server)) is not None:
            raise SettingsError(
                f"--state: {state} is in use by another `decathlon-mcp serve`, process {other.pid}: stop "
                "that one, or give each a folder of its own"
            )
        name = secrets.token_hex(6)
        descriptor = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, msgspec.json.encode(server))
        taken: dict[str, int] = {}
        for file in _files(folder):
            if file.name not in (name, *leave) and len(taken) < MAX_DEAD_SERVERS:
                _take_over(file, taken, server)
    try:
        yield InstanceLock(name, server, folder, descriptor, taken)
    finally:
        for dead in taken.values():
            os.close(dead)
        _remove(folder / name, descriptor)


async def wait_for_stop(state: Path, server: Server, seconds: float) -> None:
    """Wait for another `serve` on the state folder that is stopping, at most so long."""
    started, is_logged = anyio.current_time(), False
    while (other := serving(state, server)) is not None:
        if anyio.current_time() - started > max(SETTLE_SECONDS, seconds if other.stops else 0):
            return
        if not is_logged:
            log.warning("another server has the state folder", extra=fields(pid=other.pid, stops=other.stops))
            is_logged = True
        await anyio.sleep(RETRY_SECONDS)


def serving(state: Path, own: Server | None = None) -> Server | None:
    """The `serve` that has the state folder; None if there is none.

    While a dead `serve` is started again, that is its supervisor. `own`: a server whose supervisor does not
    count. Raises SettingsError if the folder cannot be read.
    """
    for file in server_files(state):
        if file.server.serves and file.runs:
            return file.server
        if file.server.serves and file.server.is_restarted_for(own or Server()):
            return replace(file.server, pid=file.server.supervisor or 0, stops=False)
    return None


def running_servers(state: Path) -> dict[str, int]:
    """The process of each server that runs on the state folder, by its name. Raises SettingsError."""
    return {file.name: file.server.pid for file in server_files(state) if file.runs}


def server_files(state: Path) -> list[ServerFile]:
    """The files of all servers, running or dead, by name. Blocks.

    Raises SettingsError if the folder cannot be read.
    """
    folder = state / "servers"
    with _errors_named(folder):
        return [_look_at(file) for file in _files(folder)]


def _look_at(file: Path) -> ServerFile:
    server, runs = Server(), False
    with suppress(FileNotFoundError, PermissionError):
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            server = Server.read(os.pread(descriptor, MAX_RECORD_BYTES, 0))
            # Shared, so that two processes that look at the same time do not take each other for a server.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            runs = True
        finally:
            os.close(descriptor)
    return ServerFile(file.name, server, runs)


def _take_over(file: Path, taken: dict[str, int], own: Server) -> None:
    """Lock the file of a dead server, if this server can remove what it left, and add its descriptor."""
    # It may have ended meanwhile, belong to another user, or run.
    with suppress(FileNotFoundError, PermissionError, BlockingIOError), ExitStack() as on_leave:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        on_leave.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if own.can_sweep(Server.read(os.pread(descriptor, MAX_RECORD_BYTES, 0))):
            taken[file.name] = descriptor
            on_leave.pop_all()


def _files(folder: Path) -> Iterator[Path]:
    """The files of servers, sorted by name."""
    entries = os.scandir(folder) if folder.is_dir() else ()
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.is_file(follow_symlinks=False) and not entry.name.startswith("."):
            yield folder / entry.name


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Keep files of servers from appearing and going."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove(file: Path, descriptor: int) -> None:
    # Removed before it is unlocked: a file without a lock belongs to a dead server.
    with suppress(OSError), _locked(file.parent):
        file.unlink(missing_ok=True)
    os.close(descriptor)


def _started_ticks(process: int | None) -> int | None:
    """When a process started, in clock ticks since the boot; None if it has ended."""
    found = None if process is None else read_process(process)
    return None if found is None or found.ended else found.started_ticks


@contextmanager
def _errors_named(path: Path) -> Generator[None]:
    """Raise SettingsError, with what to do, for an error of the file system."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise SettingsError(
                f"--state: the file system of {path} has no file locks ({error.strerror}), by which servers "
                "recognise each other: choose a folder on a local disk"
            ) from None
        raise SettingsError(f"--state: {path} cannot be used: {error.strerror}; {cure_of(error)}") from None
