"""The processes of one local sandbox: the first one, and all that descend from it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from decathlon_mcp.errors import ImageError
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.streams import LogTail

MARKER_VARIABLE = "DECATHLON_SANDBOX"
"""In the environment of every process of a sandbox: `<owner>/<name>`."""
KILL_SECONDS = 5.0

_MARKER = re.compile(rb"(?:^|\0)" + MARKER_VARIABLE.encode() + rb"=([^\0/]*)/([^\0]*)")
_STOPPED_STATES = frozenset("tT")
_DEAD_STATES = frozenset("ZXx")


class FirstProcess:
    """The first process of a local sandbox, in a session of its own.

    stdin and stdout are one socket. Raises ImageError if the program is not on the PATH.
    """

    # Its stdin is a socket that only this process holds: when the server dies, the driver's input ends.

    def __init__(self, spec: SandboxSpec, folder: Path, marker: str) -> None:
        self.socket, child_socket = socket.socketpair()
        try:
            self._popen = subprocess.Popen(
                spec.command,
                stdin=child_socket.fileno(),
                stdout=child_socket.fileno(),
                stderr=subprocess.PIPE,
                cwd=folder / "root",
                env=_environment(folder, marker),
                start_new_session=True,
            )
        except OSError as error:
            self.socket.close()
            raise ImageError(
                f"this machine has no {spec.command[0]} on its PATH: {error.strerror}"
            ) from error
        finally:
            child_socket.close()
        assert self._popen.stderr is not None
        self.pid = self._popen.pid
        self.log_tail = LogTail()
        self.exit_code: int | None = None
        """128 + the signal's number if a signal killed it."""
        self.ended = anyio.Event()
        self._stderr = self._popen.stderr.fileno()
        self._pidfd = os.pidfd_open(self.pid)
        os.set_blocking(self._stderr, False)

    async def wait(self) -> None:
        """Wait until it has ended, without reaping it."""
        await anyio.wait_readable(self._pidfd)
        # WNOWAIT: until it is reaped, nobody else can get its pid, by which its session is found and killed.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        status = os.waitid(os.P_PID, self.pid, options)  # noqa: ASYNC222  (does not wait)
        if status is not None:
            killed = status.si_code != os.CLD_EXITED
            self.exit_code = 128 + status.si_status if killed else status.si_status
        self.ended.set()

    async def follow_log(self) -> None:
        """Read stderr until no process holds it any more."""
        while self.read_log():
            await anyio.wait_readable(self._stderr)

    def read_log(self) -> bool:
        """Read what has been written to stderr by now; whether more may come."""
        try:
            while data := os.read(self._stderr, 65536):
                self.log_tail.add(data)
        except BlockingIOError:
            return True
        return False

    def reap(self) -> None:
        """Release the pid and the descriptors, once the whole tree has been killed."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=1)
        self.read_log()
        os.close(self._pidfd)
        assert self._popen.stderr is not None
        self._popen.stderr.close()


def _environment(folder: Path, marker: str) -> Mapping[str, str]:
    """The server's own variables without its settings; temporary files go to the sandbox's folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DECATHLON_")}
    # `python3` is the server's own Python. Not resolved: a virtual environment is recognized by the path.
    python_folder = str(Path(sys.executable).parent)
    return {
        **inherited,
        "PATH": os.pathsep.join((python_folder, inherited.get("PATH", os.defpath))),
        "TMPDIR": str(folder / "tmp"),
        MARKER_VARIABLE: marker,
    }


@dataclass(frozen=True, slots=True)
class _Status:
    parent: int
    session: int
    state: str


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """All processes of one sandbox, found in /proc.

    They have the marker `<owner>/<name>`, belong to the session of `leader`, or descend from such. A process
    that drops its environment and leaves both its session and its parents is not found. `leader` is the pid
    of the first process while it is not reaped.
    """

    owner: str
    name: str
    leader: int | None = None

    def freeze(self) -> None:
        """Stop all processes (SIGSTOP), including those that are forked meanwhile."""
        for _ in range(100):
            running = [pid for pid, status in self._find().items() if status.state not in _STOPPED_STATES]
            if not running:
                return
            _signal(running, signal.SIGSTOP)
            time.sleep(0.001)

    def kill(self) -> bool:
        """Kill all processes; whether they are gone within `KILL_SECONDS`."""
        self.freeze()  # a stopped process cannot fork while the others are killed
        deadline = time.monotonic() + KILL_SECONDS
        while remaining := self._find():
            _signal(remaining, signal.SIGKILL)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def _find(self) -> dict[int, _Status]:
        processes = _all_processes()
        marker = f"{self.owner}/{self.name}"
        tree = {
            pid
            for pid, status in processes.items()
            if self.leader in (pid, status.session) or marker_of(pid) == marker
        }
        while children := {pid for pid, status in processes.items() if status.parent in tree} - tree:
            tree |= children
        return {pid: processes[pid] for pid in tree if processes[pid].state not in _DEAD_STATES}


def sandboxes_with_processes(owner: str) -> set[str]:
    """Names of this owner's sandboxes that have a process."""
    markers = (marker_of(pid) for pid in _all_processes())
    return {marker.partition("/")[2] for marker in markers if marker and marker.partition("/")[0] == owner}


def marker_of(pid: int) -> str | None:
    """`<owner>/<name>` of a process; None if it belongs to no sandbox or may not be read."""
    try:
        match = _MARKER.search(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return None
    return match and (match[1] + b"/" + match[2]).decode("utf-8", "replace")


def _all_processes() -> dict[int, _Status]:
    """Every process of this machine but the server itself."""
    own = os.getpid()
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208
    return {pid: status for pid in pids if pid != own and (status := _status(pid))}


def _status(pid: int) -> _Status | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, and may contain both spaces and parentheses.
    state, parent, _group, session = text.rpartition(")")[2].split()[:4]
    return _Status(int(parent), int(session), state)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue
