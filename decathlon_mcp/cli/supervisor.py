"""The parent process of `serve`: it keeps the listening socket and starts the server again when it dies.

The parent never accepts a connection. While no server runs, requests wait in the socket's backlog, and the
next server answers them; clients notice a delay. A parent that dies takes its server with it (SIGKILL).

The first server parses the settings and opens the socket, so that errors at the start are its own. Once it
serves, it sends the socket to the parent over a channel, and the next servers inherit it. The parent reads
the channel when the server has died; until then the unread message keeps the socket open. The formats of
`VARIABLE` and of the message are the same in all releases: after an upgrade of the files, a new server has an
old parent.

Both sides are in this module. It imports only small modules of the standard library, because the parent
imports nothing else and lives as long as the service.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

VARIABLE = "_DECATHLON_SUPERVISOR"
"""Environment variable for the server: see `Supervised.parse`. The server removes it when it starts."""
FLAGS = ("--no-supervisor", "--no_supervisor")
"""The option of the command line by which a server has no supervisor; both spellings are the same option."""
HANDED_OVER_STATUS = 75
"""Exit status of a server that left its episodes to the next one; the parent starts that at once."""
USAGE_STATUS = 2
"""Exit status for invalid settings, or a store that this version cannot read: starting again is useless."""
MAX_MESSAGE_BYTES = 8192
"""A message on the channel is two numbers and a path."""
FIRST_ACTIVATED = 3
"""The first descriptor of systemd's socket activation, sd_listen_fds(3)."""
_PR_SET_PDEATHSIG = 1
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


class RestartLimits(NamedTuple):
    """How often a server is started again.

    A server that has served for `stable_seconds` is started again at once. A server that has not is started
    again after pauses of 0, `pause_seconds`, and twice as much each time, up to `max_pause_seconds`: at least
    `attempts` times, and as long as the sandboxes of the last server that was ready wait.
    """

    # The first pauses add up to 31 s, during which an engine that is restarted comes back. A disk that is
    # full takes a person, and a supervisor that gives up before the sandboxes do gives up their episodes.
    stable_seconds: float = 5.0
    attempts: int = 7
    pause_seconds: float = 0.5
    max_pause_seconds: float = 16.0

    def pause(self, failures: int) -> float:
        """Seconds before the next start after so many failures in a row, at least one."""
        # Bounded before it is a number that no float has.
        doubled = self.pause_seconds * 2.0 ** min(failures - 2, 64)
        return 0.0 if failures < 2 else min(doubled, self.max_pause_seconds)


DEFAULT_LIMITS = RestartLimits()


class Supervised(NamedTuple):
    """A server's side: what it has from its parent.

    `channel`: socket to the parent. `listener`: the listening socket, None for the first server. `activated`:
    whether systemd opened that socket. `restarts`: servers before this one; `cause`: how the last one ended.
    """

    parent: int
    channel: int
    listener: int | None
    activated: bool
    restarts: int
    cause: str

    @classmethod
    def parse(cls, value: str) -> Supervised:
        """Read `VARIABLE`: the parent's id, two descriptors (-1: none), 0 or 1, a number, and the cause."""
        parent, channel, listener, activated, restarts, cause = value.split(" ", 5)
        inherited = None if listener == "-1" else int(listener)
        return cls(int(parent), int(channel), inherited, activated == "1", int(restarts), cause)

    def format(self) -> str:
        """The value of `VARIABLE`."""
        listener = -1 if self.listener is None else self.listener
        fixed = (self.parent, self.channel, listener, int(self.activated), self.restarts)
        return f"{' '.join(map(str, fixed))} {self.cause}"

    def report_ready(self, listener: socket.socket, ready_file: str, wait_seconds: float = 0.0) -> None:
        """Send the listening socket to the parent, and the file that it removes when this process dies.

        `wait_seconds`: how long the sandboxes wait for the next server.
        """
        with socket.socket(fileno=os.dup(self.channel)) as channel:
            message = f"{time.monotonic()} {wait_seconds} {ready_file}".encode("utf-8", "surrogateescape")
            socket.send_fds(channel, [message], [listener.fileno()])


def current() -> Supervised | None:
    """What this process has from its parent; None without a supervisor, or before `join`."""
    return _current


_current: Supervised | None = None


def join() -> bool:
    """In a server that a supervisor has started: bind its life to the parent's. False if it has none."""
    global _current  # noqa: PLW0603  (a property of the process, read from its environment once)
    value = os.environ.pop(VARIABLE, None)
    if value is None:
        return False
    _current = Supervised.parse(value)
    for descriptor in (_current.channel, _current.listener):
        if descriptor is not None:
            # No process that the server starts may keep the port in use.
            os.set_inheritable(descriptor, False)
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != _current.parent:
        # The parent died before the kernel knew that this process must die with it.
        os._exit(128 + signal.SIGKILL)
    return True


def activated_sockets() -> int:
    """How many sockets systemd has passed to this process (sd_listen_fds(3)), from `FIRST_ACTIVATED` on."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return 0
    count = os.environ.get("LISTEN_FDS", "")
    return int(count) if count.isdecimal() else 0


def applies(arguments: Sequence[str]) -> bool:
    """Whether a command line starts a server with a supervisor."""
    # Only Linux can end a process with its parent. A wrong number of sockets is an error of the server's.
    return (
        sys.platform == "linux"
        and arguments[:1] == ["serve"]
        and not any(argument.startswith(FLAGS) for argument in arguments)
        and activated_sockets() <= 1
    )


def supervise(command: list[str], limits: RestartLimits = DEFAULT_LIMITS) -> int:
    """Run a server and its successors until one ends for good; return the exit status.

    It ends for good when it was stopped, ended with status 0 or `USAGE_STATUS`, never got ready, or died too
    often. SIGTERM and SIGINT are passed on. The calling process must have a single thread: the server dies
    with the thread that started it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller that ignores it would leave nothing to wait for
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        return _Supervisor(command, limits, previous).run()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class _Supervisor:
    """State of the parent. Signals are blocked and taken one by one, so nothing runs in a handler."""

    def __init__(self, command: list[str], limits: RestartLimits, mask: Iterable[int]) -> None:
        self._command = command
        self._limits = limits
        self._mask = mask
        self._activated = activated_sockets() == 1
        self._listener = FIRST_ACTIVATED if self._activated else None
        self._child = 0
        self._ready_file = ""
        self._ready_time: float | None = None
        self._wait_seconds = 0.0
        self._ever_ready = False
        self._stopping = False

    def run(self) -> int:
        """Run servers until one ends for good; return its exit status, 128 + N after signal N."""
        failures = restarts = 0
        cause, died_at = "-", 0.0
        while True:
            status = self._run_server(restarts, cause)
            exit_status = 128 - status if status < 0 else status
            if self._stopping:
                return 0 if status == HANDED_OVER_STATUS else exit_status
            if status in (0, USAGE_STATUS) or not self._ever_ready:
                return exit_status
            restarts += 1
            cause = _describe(status)
            if status == HANDED_OVER_STATUS:
                failures = 0
                continue
            now = time.monotonic()
            served_seconds = 0.0 if self._ready_time is None else now - self._ready_time
            failures = 1 if served_seconds >= self._limits.stable_seconds else failures + 1
            if failures == 1:
                died_at = now
            if failures > self._limits.attempts and now - died_at >= self._wait_seconds:
                sys.stderr.write(
                    f"decathlon-mcp: the server died {failures} times in a row, each before it had served "
                    f"for {self._limits.stable_seconds:g} s, the last by {cause}; it is not started again\n"
                )
                return exit_status
            self._pause(self._limits.pause(failures))
            if self._stopping:
                return exit_status

    def _run_server(self, restarts: int, cause: str) -> int:
        """Start one server and wait for its end. Returns its exit status, or -N after signal N."""
        self._ready_time = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                self._child = self._start(theirs.fileno(), restarts, cause)
            status = self._wait(ours)
            self._receive(ours)
        if self._ready_file:
            # A server that stops in order has removed it.
            with suppress(OSError):
                os.unlink(self._ready_file)  # noqa: PTH108  (pathlib would be the largest import)
            self._ready_file = ""
        return status

    def _start(self, channel: int, restarts: int, cause: str) -> int:
        supervised = Supervised(os.getpid(), channel, self._listener, self._activated, restarts, cause)
        for descriptor in (channel, self._listener):
            if descriptor is not None:
                os.set_inheritable(descriptor, True)
        # systemd's variables name this process; the server gets the socket by `VARIABLE`.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LISTEN_")}
        try:
            # A session of its own: Ctrl-C reaches the whole foreground group, and a server that got it twice,
            # from the terminal and from here, would end without draining.
            return os.posix_spawn(
                self._command[0],
                self._command,
                {**environment, VARIABLE: supervised.format()},
                setsid=True,
                setsigmask=self._mask,
            )
        except OSError as error:
            # Python itself is missing, for a moment perhaps while it is upgraded.
            sys.stderr.write(f"decathlon-mcp: {self._command[0]}: {error.strerror}\n")
            return 0

    def _wait(self, channel: socket.socket) -> int:
        """Wait until the server has ended, and pass on signals."""
        while self._child:
            number = signal.sigwaitinfo(_WATCHED).si_signo
            if number == signal.SIGCHLD:
                if (status := self._reap()) is not None:
                    return status
                continue
            self._stopping = True
            os.kill(self._child, number)
            # While the server drains, nobody else keeps its port open.
            self._receive(channel)
            self._close_listener()
        return 127

    def _reap(self) -> int | None:
        """Collect ended processes; return the server's status if it is among them."""
        result = None
        # In a container this is the first process, which inherits the orphans of others.
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return result
            if process == 0:
                return result
            if process == self._child:
                result = os.waitstatus_to_exitcode(status)

    def _receive(self, channel: socket.socket) -> None:
        """Take the server's message, if there is one; it can also be read after the server's death."""
        try:
            message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 1, socket.MSG_DONTWAIT)
        except OSError:
            return
        if not message:
            return
        self._ever_ready = True
        ready_time, wait_seconds, ready_file = message.decode("utf-8", "surrogateescape").split(" ", 2)
        self._ready_time, self._wait_seconds = float(ready_time), float(wait_seconds)
        self._ready_file = ready_file
        for descriptor in descriptors:
            if self._listener is None:
                self._listener = descriptor
            else:
                os.close(descriptor)
        if self._stopping:
            self._close_listener()

    def _close_listener(self) -> None:
        if self._listener is not None:
            os.close(self._listener)
            self._listener = None

    def _pause(self, seconds: float) -> None:
        """Wait until the next start; a signal to stop ends the pause."""
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0 and not self._stopping:
            info = signal.sigtimedwait(_WATCHED, remaining)
            if info is not None and info.si_signo == signal.SIGCHLD:
                self._reap()
            elif info is not None:
                self._stopping = True


def _describe(status: int) -> str:
    """How a process ended, for people."""
    if status == HANDED_OVER_STATUS:
        return "hand-over"
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
