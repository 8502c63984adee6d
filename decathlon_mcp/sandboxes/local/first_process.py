"""The first process of a local sandbox."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import anyio

from decathlon_mcp.errors import ImageError
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.local.process_table import MARKER_VARIABLE, ProcessId
from decathlon_mcp.sandboxes.streams import LogTail


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
        self.id = ProcessId.of(self.pid)
        """None only if /proc cannot be read: until it is reaped, an ended process has an entry there."""
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
