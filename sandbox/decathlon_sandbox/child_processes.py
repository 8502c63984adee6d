"""Child processes: started, reaped, and killed together with everything that descends from them. And `run`.

Without /proc, only process groups can be killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence

from decathlon_sandbox import wire
from decathlon_sandbox.byte_streams import Reader, TailBuffer
from decathlon_sandbox.driver_requests import Request, RequestError, describe_error
from decathlon_sandbox.event_loop import EventLoop
from decathlon_sandbox.process_table import (
    Process,
    children_by_parent,
    descendants,
    marked_processes,
    matches_command,
    read_processes,
)
from decathlon_sandbox.strict_json import JsonObject

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ctypes import CDLL
    from socket import socket
    from typing import IO

ProcessTable = dict[int, Process]

# The variables that the MCP SDK's stdio client passes to a server.
MINIMAL_VARIABLES = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")
KILL_SECONDS = 5.0
KILL_ALL_SECONDS = 20.0
"""The same for all processes: a process that outlives it costs the agent its reward. On a machine on which
hundreds of sandboxes end at once, a killed process can take longer than KILL_SECONDS to be gone."""
KILL_INTERVAL_SECONDS = 0.002
LATE_KILL_INTERVAL_SECONDS = 0.05
"""Time between two rounds after KILL_SECONDS."""
LINGER_INTERVAL_SECONDS = 0.02
CHANNEL_BYTES = 1 << 20
"""What is kept of the channel of a run."""
MERGED_VARIABLES = {"PYTHONHASHSEED": "0"}
"""For the environment of the task's servers after `merge`, unless their settings say otherwise: it fixes the
order of Python's sets and dictionaries of strings."""
# linux/prctl.h, the last one since Linux 6.4
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_MEMORY_MERGE = 67
# linux/personality.h
_ADDR_NO_RANDOMIZE = 0x40000


def child_environment(extra: dict[str, str], cwd: str, *, minimal: bool = False) -> dict[str, str]:
    """Environment of a child: the driver's variables, or MINIMAL_VARIABLES of them, and `extra`.

    With all of them, PWD is `cwd`, as for a program that a shell starts.
    """
    own = os.environ
    if minimal:
        # A value that starts with "()" is an exported shell function; the SDK leaves such values out too.
        names = [name for name in MINIMAL_VARIABLES if name in own and not own[name].startswith("()")]
        return {**{name: own[name] for name in names}, **extra}
    return {**{name: own[name] for name in own if name != wire.MEMORY_VARIABLE}, "PWD": cwd, **extra}


def marked(env: dict[str, str], mark: str) -> dict[str, str]:
    """The environment of a child with its mark."""
    # First, so that it is found at the beginning of however long an environment.
    return {wire.MARK_VARIABLE: mark, **env, wire.MARK_VARIABLE: mark}


class Child:
    """A process in its own session, and the driver's ends of its pipes; their user closes them.

    `exit_code` is None while the process runs; a negative number is the signal that ended it.
    """

    def __init__(
        self,
        pid: int,
        mark: str,
        on_exit: Callable[[int], object],
        streams: Iterable[int],
        popen: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.popen = popen
        self.pid = pid
        self.mark = mark
        self.on_exit = on_exit
        self.exit_code: int | None = None
        self.stdin, self.stdout, self.stderr = streams
        self.channel = -1


class ProcessSupervisor:
    """Starts children, reaps processes that end, and kills whole process trees."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._children: dict[int, Child] = {}
        # Processes that only the driver's own end kills (`spare` of `freeze`).
        self.exempt: frozenset[int] = frozenset()
        # Variables of the task's servers that their own settings can replace.
        self.server_variables: dict[str, str] = {}
        # Processes that a run with `leave` started in the background, and the marks of these runs.
        self._background: set[int] = set()
        self._background_marks: set[str] = set()
        self._mark = os.urandom(8).hex()
        self._started_count = 0
        _harden_driver()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def merge_memory(self) -> None:
        """Let the kernel merge equal pages with other sandboxes' (KSM), and fix addresses, where it can.

        Pages of an interpreter are equal only if the pointers in them are. Merging holds for this process at
        once, and fixed addresses for every program that is executed; the driver's own are random.
        """
        self.server_variables = MERGED_VARIABLES
        libc = _libc()
        if libc is not None:
            libc.prctl(_PR_SET_MEMORY_MERGE, 1, 0, 0, 0)
            # Replaces the personality as a whole: Docker's seccomp profile compares with single values, and
            # every ordinary process has 0 before.
            libc.personality(_ADDR_NO_RANDOMIZE)

    def spawn(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: dict[str, str],
        on_exit: Callable[[int], object],
        stdin: bool = False,
        channel: bool = False,
    ) -> Child:
        """Start a process; without `stdin` its stdin is empty. Raises OSError, ValueError.

        The program is looked up in the PATH of `env`. `on_exit` receives the exit code, or minus the signal.
        """
        mark = self.new_mark()
        env = marked(env, mark)
        ends: tuple[socket, ...] = ()
        if channel:
            from socket import socketpair

            # A pipe could be opened through /proc/PID/fd. Linux refuses that where the process is not
            # dumpable, gVisor does not.
            ends = socketpair()
            env[wire.CHANNEL_VARIABLE] = str(ends[1].fileno())
        try:
            popen = subprocess.Popen(
                argv,
                bufsize=0,
                cwd=cwd,
                env=env,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[end.fileno() for end in ends[1:]],
                start_new_session=True,
            )
            streams = map(_take_descriptor, (popen.stdin, popen.stdout, popen.stderr))
            child = Child(popen.pid, mark, on_exit, streams, popen)
            if ends:
                child.channel = os.dup(ends[0].fileno())
        finally:
            for end in ends:
                end.close()
        return self.adopt(child)

    def new_mark(self) -> str:
        """The mark of another child."""
        self._started_count += 1
        return f"{self._mark}-{self._started_count}-"

    def adopt(self, child: Child) -> Child:
        """Watch a process that is a child of this one."""
        self._children[child.pid] = child
        return child

    def process_tree(self, child: Child) -> set[int]:
        """Living processes that `child` started, directly or not, daemons included.

        These are its descendants, its session, and descendants of the driver with its mark. If no other child
        runs, they are all of the driver's descendants: that finds processes that cleared their environment
        too. Exempt and kept background processes belong to no tree.

        A mark decides only with which child a process of this sandbox ends; all of them end in `kill_all`.
        """
        table = _living_processes()
        children = children_by_parent(table.values())
        kept = self.exempt | self._living_background(table, children)
        all_descendants = descendants([os.getpid()], children) - kept
        if all(other is child for other in self._children.values()):
            return all_descendants
        tree = {pid for pid, process in table.items() if process.session == child.pid}
        tree |= {child.pid} & table.keys()
        tree |= descendants(tree, children)
        candidates = all_descendants - tree - self._children.keys()
        return (tree | marked_processes([table[pid] for pid in candidates], {child.mark})) - kept

    def keep_background(self, child: Child, linger_seconds: float, on_done: Callable[[int], object]) -> None:
        """Keep the processes that `child`, which has exited, left running (`leave` of `run`).

        `on_done` receives their number: at once if it is 0, otherwise when they have ended by themselves or
        after `linger_seconds`.
        """
        deadline = time.monotonic() + linger_seconds

        def count() -> None:
            tree = self.process_tree(child)
            if tree and time.monotonic() < deadline:
                self._loop.call_later(LINGER_INTERVAL_SECONDS, count)
                return
            if tree:
                self._background |= tree
                self._background_marks.add(child.mark)
            on_done(len(tree))

        count()

    def exempt_matching(self, patterns: Sequence[str]) -> None:
        """Exempt the running processes whose command line matches a pattern from being killed."""
        if patterns:
            self.exempt = frozenset(pid for pid in self.all_processes() if matches_command(pid, patterns))

    def all_processes(self) -> set[int]:
        """Every living process that the driver may kill, also exempt processes.

        As a machine's first process these are all processes except the driver itself.
        """
        table = _living_processes()
        if os.getpid() == 1:
            return table.keys() - {1}
        return descendants([os.getpid()], children_by_parent(table.values()))

    def kill_tree(self, child: Child, on_done: Callable[[], object]) -> None:
        """Kill the process tree of `child`, then call `on_done`, after at most KILL_SECONDS."""
        self._kill_until_gone(lambda: self.process_tree(child), self._kill, lambda _: on_done())

    def kill_all(self, on_done: Callable[[set[int]], object]) -> None:
        """Kill all processes but the exempt; `on_done` receives survivors after KILL_ALL_SECONDS."""
        kill = self._kill if self.exempt else _kill_everything
        self._kill_until_gone(
            lambda: self.all_processes() - self.exempt, kill, on_done, limit_seconds=KILL_ALL_SECONDS
        )

    def kill_all_blocking(self) -> None:
        """Kill all processes, also exempt processes, without the event loop: the driver's last action."""
        deadline = time.monotonic() + KILL_SECONDS
        while (alive := self.all_processes()) and time.monotonic() < deadline:
            _kill_everything(alive)
            time.sleep(KILL_INTERVAL_SECONDS)
            self._wait_children()

    def _kill_until_gone(
        self,
        find: Callable[[], set[int]],
        kill: Callable[[set[int]], object],
        on_done: Callable[[set[int]], object],
        *,
        limit_seconds: float = KILL_SECONDS,
    ) -> None:
        # In rounds: a process can fork between the listing and the kill.
        begun_at = time.monotonic()

        def kill_round() -> None:
            alive, elapsed_seconds = find(), time.monotonic() - begun_at
            if alive and elapsed_seconds < limit_seconds:
                kill(alive)
                is_late = elapsed_seconds > KILL_SECONDS
                seconds = LATE_KILL_INTERVAL_SECONDS if is_late else KILL_INTERVAL_SECONDS
                self._loop.call_later(seconds, kill_round)
            else:
                on_done(alive)

        kill_round()

    def _kill(self, pids: set[int]) -> None:
        kill_processes(pids, self.exempt)

    def _living_background(self, table: ProcessTable, children: dict[int, list[int]]) -> set[int]:
        """Kept background processes that still run, with what they have started since."""
        if self._background_marks:
            self._background &= table.keys()
            own = descendants([os.getpid()], children)
            self._background |= marked_processes((table[pid] for pid in own), self._background_marks)
            self._background |= descendants(self._background, children)
        return self._background

    def _reap(self) -> None:
        for child in self._wait_children():
            child.on_exit(child.exit_code or 0)

    def _wait_children(self) -> list[Child]:
        """Reap all processes that have ended; return the children among them."""
        exited: list[Child] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return exited
            if pid == 0:
                return exited
            self._background.discard(pid)
            child = self._children.pop(pid, None)
            if child is not None:
                child.exit_code = os.waitstatus_to_exitcode(status)
                if child.popen is not None:
                    child.popen.returncode = child.exit_code
                exited.append(child)


def _living_processes() -> ProcessTable:
    return {pid: process for pid, process in read_processes().items() if not process.ended}


def kill_processes(pids: Iterable[int], exempt: Iterable[int] = ()) -> None:
    """Send SIGKILL to the processes and to their process groups, except groups with an exempt process.

    Processes that are already gone are ignored.
    """
    # Killing the group reaches processes that fork faster than /proc can be read. It hits no stranger: a
    # group lies within one session, and every child has its own session.
    kept_groups = {os.getpgrp(), *map(_process_group, exempt)}
    for pid in pids:
        try:
            group = os.getpgid(pid)
            if group not in kept_groups:
                os.killpg(group, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass


def _kill_everything(pids: set[int]) -> None:
    if os.getpid() == 1:
        os.kill(-1, signal.SIGKILL)  # atomic: no process can fork away from it
    else:
        kill_processes(pids)


def _process_group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _take_descriptor(pipe: IO[bytes] | None) -> int:
    """A descriptor of the driver's end of a pipe, which its file does not close."""
    if pipe is None:
        return -1
    with pipe:
        return os.dup(pipe.fileno())


def _libc() -> CDLL | None:
    try:
        import ctypes  # takes 3 ms

        return ctypes.CDLL(None)
    except (ImportError, OSError):
        return None


def _harden_driver() -> None:
    """Protect the driver from its children, and adopt orphans, as a machine's first process does anyway.

    Needs `ctypes`, without which another than a machine's first process does not find orphans.
    """
    libc = _libc()
    if libc is None:
        return
    # Keeps processes without CAP_SYS_PTRACE from attaching to the driver and out of its fd, environ and mem
    # in /proc.
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if os.getpid() == 1:
        from decathlon_sandbox.seccomp_filters import protect_first_process

        protect_first_process(libc)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Run:
    """Runs one command and answers its request once the command and its process tree have ended."""

    def __init__(
        self, loop: EventLoop, supervisor: ProcessSupervisor, request: Request, params: JsonObject
    ) -> None:
        self._supervisor = supervisor
        self._request = request
        self._timed_out = False
        self._cancelled = False
        self._keep_background: bool = params.get("leave", False)
        self._linger_seconds: float = params.get("linger_seconds", 0.0)
        argv, cwd = params["argv"], params["cwd"]
        env = child_environment(params["env"], cwd)
        try:
            self._child = supervisor.spawn(
                argv, cwd=cwd, env=env, on_exit=self._on_exit, channel=params["channel"]
            )
        except (OSError, ValueError) as error:
            raise RequestError(wire.SPAWN, f"{argv[0]} cannot be run: {describe_error(error)}") from None
        self._stdout = TailBuffer(params["output_bytes"])
        self._stderr = TailBuffer(params["output_bytes"])
        self._channel = bytearray() if params["channel"] else None
        self._readers = [
            Reader(loop, self._child.stdout, self._stdout.feed),
            Reader(loop, self._child.stderr, self._stderr.feed),
        ]
        if self._channel is not None:
            self._readers.append(Reader(loop, self._child.channel, self._on_channel))
        self._deadline = loop.call_later(params["timeout_seconds"], self._on_timeout)
        request.on_cancel = self._on_cancel

    def _on_channel(self, chunk: bytes) -> None:
        if self._channel is not None:
            self._channel += chunk[: CHANNEL_BYTES - len(self._channel)]

    def _on_timeout(self) -> None:
        self._timed_out = True
        self._supervisor.kill_tree(self._child, lambda: None)

    def _on_cancel(self) -> None:
        self._cancelled = True
        self._supervisor.kill_tree(self._child, lambda: None)

    def _on_exit(self, exit_code: int) -> None:
        self._deadline.cancel()
        if self._keep_background and not (self._timed_out or self._cancelled):
            self._supervisor.keep_background(self._child, self._linger_seconds, self._on_background_counted)
        else:
            self._supervisor.kill_tree(self._child, self._on_tree_killed)

    def _on_background_counted(self, count: int) -> None:
        # The readers stay open: a background process that writes to a closed pipe would be killed.
        for reader in self._readers:
            reader.read_available()
        self._respond(count)

    def _on_tree_killed(self) -> None:
        for reader in self._readers:
            reader.drain()
        self._respond(0)

    def _respond(self, background_count: int) -> None:
        if self._cancelled:
            self._request.fail(RequestError(wire.CANCELLED, "the run was cancelled"))
            return
        code = self._child.exit_code
        self._request.reply(
            {
                "exit_code": code if code is not None and code >= 0 else None,
                "signal": -code if code is not None and code < 0 else None,
                "timed_out": self._timed_out,
                "stdout": self._stdout.text(),
                "stderr": self._stderr.text(),
                "channel": None if self._channel is None else self._channel.decode("utf-8", "replace"),
                "background": background_count,
            }
        )
