"""The first process of a sandbox that this machine runs without an engine."""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import anyio

from decathlon_mcp.errors import SandboxLostError
from decathlon_mcp.sandboxes.host.processes import ProcessId
from decathlon_mcp.sandboxes.streams import CHUNK_BYTES, LogTail, PipeStream

STANDARD_STREAMS = ("stdin", "stdout", "stderr")
"""Also the names of the pipes in the folder of a sandbox that survives."""
MAX_LOG_BYTES = 1 << 20
"""Most that is read of stderr at once: the largest pipe. A process that writes without end would otherwise
keep the event loop busy."""
LOG_SECONDS = 0.05
"""Time for which nothing is read of stderr once something was written to it: with MAX_LOG_BYTES at most 20
MiB a second, which take some 15 ms of the event loop's time."""
_WITH_SIGNALS = """
import os, signal, sys
for number in signal.valid_signals():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Executes a command that ignores and blocks no signal, which is inherited otherwise."""
_OF_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
"""Ignored by every Python, and restored by `subprocess`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start as a first process: a program on this machine's PATH, with its arguments.

    `descriptors`: open files that it inherits under the same numbers. `survives`: see `SandboxSpec`.
    """

    command: tuple[str, ...]
    cwd: Path
    environment: Mapping[str, str]
    survives: bool
    descriptors: tuple[int, ...] = ()


class FirstProcess:
    """The first process of a sandbox, in a session of its own. Create it with `start` or `reattach`.

    A process that survives has both ends of three named pipes open. So its input does not end and its output
    does not break without a server, and what a pipe has room for (64 KiB) is kept for the next one; beyond
    that, a process that may not stop must write without blocking. The input of any other process ends when
    the server dies, since only the server has the other end of its pipe.
    """

    def __init__(
        self,
        process_id: ProcessId | None,
        pidfd: int,
        stream: PipeStream,
        stderr: int,
        *,
        folder: Path,
        popen: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.id = process_id
        """None only if /proc cannot be read: until it is reaped, an ended process has an entry there."""
        self.stream = stream
        self.log_tail = LogTail()
        self.exit_code: int | None = None
        """128 + the signal's number if a signal killed it. None if another server started it."""
        self.ended = anyio.Event()
        self._popen = popen
        self._folder = folder
        self.stderr = stderr
        """The read end of a pipe, hung up when no process of the sandbox is left."""
        self._pidfd = pidfd
        os.set_blocking(stderr, False)

    @classmethod
    def start(cls, launch: Launch, folder: Path) -> Self:
        """Start it. `folder`: of the sandbox, for its pipes. Raises OSError if the program is not there."""
        with ExitStack() as on_error, ExitStack() as children:
            own: list[int] = []
            inherited: list[int] = []
            for name in STANDARD_STREAMS:
                pipe = _named_pipe(folder, name) if launch.survives else _pipe(name)
                own.append(pipe[0])
                inherited.append(pipe[1])
                on_error.callback(os.close, pipe[0])
                children.callback(os.close, pipe[1])
            popen = subprocess.Popen(
                (*_signals_launcher(), *launch.command),
                stdin=inherited[0],
                stdout=inherited[1],
                stderr=inherited[2],
                cwd=launch.cwd,
                env=launch.environment,
                pass_fds=launch.descriptors,
                start_new_session=True,
            )
            pidfd = os.pidfd_open(popen.pid)
            on_error.pop_all()
        stdin, stdout, stderr = own
        stream = PipeStream(stdout, stdin)
        return cls(ProcessId.of(popen.pid), pidfd, stream, stderr, folder=folder, popen=popen)

    @classmethod
    def reattach(cls, process_id: ProcessId, folder: Path) -> Self:
        """Continue a process that survived the server that started it.

        Raises SandboxLostError if it has ended.
        """
        with ExitStack() as on_error:
            try:
                pidfd = os.pidfd_open(process_id.pid)
            except OSError:
                raise SandboxLostError("the sandbox's first process has ended") from None
            on_error.callback(os.close, pidfd)
            # Compared after the descriptor is open: the number may belong to another process by now.
            if ProcessId.of(process_id.pid) != process_id or _has_ended(pidfd):
                raise SandboxLostError("the sandbox's first process has ended")
            stderr = _open_pipe(folder, "stderr")
            on_error.callback(os.close, stderr)
            stream = _open_stream(folder)
            on_error.pop_all()
        return cls(process_id, pidfd, stream, stderr, folder=folder)

    async def reopen(self) -> None:
        """Replace `stream` by a new stream. Only for a process that survives. Raises SandboxLostError."""
        await self.stream.aclose()
        if self.ended.is_set():
            raise SandboxLostError("the sandbox's first process has ended")
        self.stream = _open_stream(self._folder)

    async def close_stream(self) -> None:
        await self.stream.aclose()

    async def wait(self) -> None:
        """Wait until it has ended, without reaping it. Then its stream ends."""
        await anyio.wait_readable(self._pidfd)
        if self._popen is not None:
            # WNOWAIT: until it is reaped, nobody else can get its pid, by which its session is found and
            # killed.
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            status = os.waitid(os.P_PID, self._popen.pid, options)  # noqa: ASYNC222  (does not wait)
            if status is not None:
                killed = status.si_code != os.CLD_EXITED
                self.exit_code = 128 + status.si_status if killed else status.si_status
        self.ended.set()
        # A descendant may still have the other end open.
        self.stream.peer_ended()

    async def follow_log(self) -> None:
        """Read stderr until no process holds it any more."""
        while self.read_log():
            await anyio.wait_readable(self.stderr)
            await anyio.sleep(LOG_SECONDS)

    def read_log(self) -> bool:
        """Read what has been written to stderr by now, up to a limit; whether more may come."""
        with suppress(BlockingIOError):
            for _ in range(MAX_LOG_BYTES // CHUNK_BYTES):
                if not (data := os.read(self.stderr, CHUNK_BYTES)):
                    return False
                self.log_tail.add(data)
        return True

    def reap(self) -> None:
        """Release the pid and the descriptors, once the whole tree has been killed."""
        with ExitStack() as descriptors:
            descriptors.callback(os.close, self._pidfd)
            descriptors.callback(os.close, self.stderr)
            if self._popen is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._popen.wait(timeout=1)
            self.read_log()


def _signals_launcher() -> tuple[str, ...]:
    """A command line that executes the rest of it without what this server ignores or blocks, if anything.

    A server that `nohup`, or a shell without job control, has started ignores some signals.
    """
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    if ignored <= _OF_PYTHON and not signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return ()
    # Not `preexec_fn`, which is not safe with threads; no program that every machine has does this.
    return (sys.executable, "-I", "-S", "-c", _WITH_SIGNALS)


def _pipe(name: str) -> tuple[int, int]:
    """A new pipe: the server's end, and the first process's."""
    read_end, write_end = os.pipe()
    return (write_end, read_end) if name == "stdin" else (read_end, write_end)


def _named_pipe(folder: Path, name: str) -> tuple[int, int]:
    """A new named pipe: the server's end, and a descriptor of both ends for the first process."""
    os.mkfifo(folder / name, 0o600)
    both = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _open_pipe(folder, name), both
    except BaseException:
        os.close(both)
        raise


def _open_stream(folder: Path) -> PipeStream:
    stdout = _open_pipe(folder, "stdout")
    try:
        return PipeStream(stdout, _open_pipe(folder, "stdin"))
    except BaseException:
        os.close(stdout)
        raise


def _open_pipe(folder: Path, name: str) -> int:
    """The server's end of a named pipe. Raises SandboxLostError."""
    # Without O_NONBLOCK this would wait for the other end. What runs in the sandbox can replace the pipe, for
    # example by a link.
    direction = os.O_WRONLY if name == "stdin" else os.O_RDONLY
    reason = "is no pipe"
    try:
        descriptor = os.open(folder / name, direction | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        reason = f"cannot be opened: {error.strerror}"
    raise SandboxLostError(f"the sandbox's first process cannot be reached: its {name} {reason}")


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
