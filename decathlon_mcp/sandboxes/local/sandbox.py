"""One sandbox that is no more than a process of this machine, its descendants, and a folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

import anyio
from anyio import CapacityLimiter, to_thread

from decathlon_mcp.archives.packing import pack
from decathlon_mcp.archives.unpacking import unpack
from decathlon_mcp.errors import BadRequestError, ImageError, SandboxLostError
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.local.processes import MARKER_VARIABLE, ProcessTree
from decathlon_mcp.sandboxes.log_tail import LogTail
from decathlon_mcp.sandboxes.socket_stream import SocketStream

CAUSE_SECONDS = 2.0


class FirstProcess:
    """The first process of a local sandbox: started in a session of its own, watched, reaped last of all.

    Its stdin and stdout are one socket, so that the server's death is the end of its input.
    """

    def __init__(self, spec: SandboxSpec, home: Path, marker: str) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._popen = subprocess.Popen(
                spec.command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                cwd=home / "root",
                env=_environment(spec, home, marker),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ImageError(
                f"this machine has no {spec.command[0]} on its PATH: {error.strerror}"
            ) from error
        finally:
            theirs.close()
        assert self._popen.stderr is not None
        self.socket = ours
        self.number = self._popen.pid
        self.tail = LogTail()
        self.exit_code: int | None = None
        self.ended = anyio.Event()
        self._stderr = self._popen.stderr.fileno()
        self._handle = os.pidfd_open(self.number)
        os.set_blocking(self._stderr, False)

    async def watch(self) -> None:
        """Until it has ended. It is not reaped yet: its number stays its own."""
        await anyio.wait_readable(self._handle)
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        status = os.waitid(os.P_PID, self.number, how)  # noqa: ASYNC222  (does not wait)
        if status is not None:
            killed = status.si_code != os.CLD_EXITED
            self.exit_code = 128 + status.si_status if killed else status.si_status
        self.ended.set()

    async def follow_log(self) -> None:
        """Until nobody is left who could write to it."""
        while self.read_log():
            await anyio.wait_readable(self._stderr)

    def read_log(self) -> bool:
        """Take what has been written to it up to now; may more come?"""
        try:
            while said := os.read(self._stderr, 65536):
                self.tail.add(said)
        except BlockingIOError:
            return True
        return False

    def reap(self) -> None:
        """After all of its tree has been killed."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=1)
        self.read_log()
        os.close(self._handle)
        assert self._popen.stderr is not None
        self._popen.stderr.close()


def _environment(spec: SandboxSpec, home: Path, marker: str) -> Mapping[str, str]:
    """This process's own but for our settings; `python3` is this very Python, scratch stays in `home`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("DECATHLON_")}
    # Not resolved: what makes a virtual environment is where its python was found.
    python = str(Path(sys.executable).parent)
    return {
        **own,
        "PATH": os.pathsep.join((python, own.get("PATH", os.defpath))),
        "TMPDIR": str(home / "tmp"),
        **dict(spec.environment),
        MARKER_VARIABLE: marker,
    }


class LocalSandbox:
    """See `base.Sandbox`. Only what lies below its root is packed or unpacked."""

    def __init__(
        self, spec: SandboxSpec, root: Path, process: FirstProcess, line: SocketStream, tree: ProcessTree
    ) -> None:
        self.spec = spec
        self.root = PurePosixPath(root)
        self.stream = line
        self.out_of_memory = False
        self.image_digest = None
        self._process = process
        self._tree = tree
        self._threads = CapacityLimiter(4)
        self._gone = False

    @property
    def log_tail(self) -> str:
        if not self._gone:
            self._process.read_log()
        return str(self._process.tail)

    async def put(self, folder: PurePosixPath, archive: Path | bytes) -> None:
        target = self._inside(folder)
        await to_thread.run_sync(
            lambda: unpack(archive, target, below=Path(self.root)),
            limiter=self._threads,
            abandon_on_cancel=True,
        )

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        source = self._inside(folder)
        await to_thread.run_sync(
            lambda: pack(source, archive, limit_bytes, below=Path(self.root)),
            limiter=self._threads,
            abandon_on_cancel=True,
        )

    async def pause(self) -> None:
        self._inside(self.root)
        if self._process.ended.is_set():
            raise SandboxLostError("the sandbox's first process has ended")
        await to_thread.run_sync(self._tree.freeze, limiter=self._threads)

    async def cause_of_end(self) -> str | None:
        if self.stream.ended.is_set():
            with anyio.move_on_after(CAUSE_SECONDS):
                await self._process.ended.wait()
        code = self._process.exit_code
        return None if code is None else f"exit code {code}"

    def close(self) -> None:
        """From now on it is gone."""
        self._gone = True

    def _inside(self, folder: PurePosixPath) -> Path:
        if self._gone:
            raise SandboxLostError("the sandbox has been closed")
        if not folder.is_relative_to(self.root) or ".." in folder.parts:
            raise BadRequestError(f"{folder} does not lie below the sandbox's root, {self.root}")
        return Path(folder)
