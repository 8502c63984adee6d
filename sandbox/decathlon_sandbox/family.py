"""All that the driver has started: children, their whole trees, orphans that came to us."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from decathlon_sandbox import processes, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from decathlon_sandbox.loop import Loop

MINIMAL = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")
"""What the MCP SDK's stdio client lets a server inherit."""
CLEAR_SECONDS = 5.0
ROUND_SECONDS = 0.002


def environment(inherit: str, added: dict[str, str], path: str | None = None) -> dict[str, str]:
    """What a child gets: `inherit` "all" or "minimal"; `path` instead of the inherited PATH; `added` wins."""
    ours = os.environ
    if inherit == "minimal":
        given = {name: ours[name] for name in MINIMAL if name in ours and not ours[name].startswith("()")}
    else:
        given = {name: value for name, value in ours.items() if name != wire.LEASE_VARIABLE}
    if path is not None:
        given["PATH"] = path
    return {**given, **added}


class Child:
    """A process in a session of its own, and the ends of its pipes that are ours (the taker closes them)."""

    __slots__ = ("channel", "exit_code", "mark", "on_exit", "pid", "popen", "stderr", "stdin", "stdout")

    def __init__(self, popen: subprocess.Popen[bytes], mark: str, on_exit: Callable[[int], object]) -> None:
        self.popen = popen
        self.pid = popen.pid
        self.mark = mark
        self.on_exit = on_exit
        self.exit_code: int | None = None
        """None while it runs; negative: the signal that ended it."""
        self.stdin = self.stdout = self.stderr = self.channel = -1


class Family:
    """Starts children, reaps whatever ends, kills whole trees."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._children: dict[int, Child] = {}
        self.spared: frozenset[int] = frozenset()
        """Processes that nothing but our own end ends."""
        self._left: set[int] = set()
        self._left_marks: set[str] = set()
        self._mark = os.urandom(8).hex()
        self._started = 0
        label = os.environ.get(wire.SANDBOX_VARIABLE)
        self._labels = {} if label is None else {wire.SANDBOX_VARIABLE: label}
        self._adopts = processes.harden()
        loop.on_signal(signal.SIGCHLD, self._reap)

    def spawn(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: dict[str, str],
        on_exit: Callable[[int], object],
        talks: bool = False,
        channel: bool = False,
    ) -> Child:
        """Start a process. With `talks` its stdin is a pipe, else empty. Raises OSError.

        The program is looked up in the PATH of `env`. `on_exit` gets the exit code, or minus the signal.
        """
        self._started += 1
        mark = f"{self._mark}-{self._started}-"
        env = {**env, **self._labels, wire.MARK_VARIABLE: mark}
        theirs: list[int] = []
        ours: list[int] = []

        def pipe(*, to_child: bool = False) -> int:
            ends = os.pipe()
            theirs.append(ends[0 if to_child else 1])
            ours.append(ends[1 if to_child else 0])
            return theirs[-1]

        try:
            stdin = pipe(to_child=True) if talks else subprocess.DEVNULL
            stdout, stderr = pipe(), pipe()
            passed: tuple[int, ...] = ()
            if channel:
                passed = (pipe(),)
                env[wire.CHANNEL_VARIABLE] = str(passed[0])
            popen = subprocess.Popen(
                argv,
                cwd=cwd,
                env=env,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=passed,
                start_new_session=True,
            )
        except (OSError, ValueError):
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        child = Child(popen, mark, on_exit)
        if talks:
            child.stdin = ours.pop(0)
        child.stdout, child.stderr, *rest = ours
        child.channel = rest[0] if rest else -1
        self._children[child.pid] = child
        return child

    def tree(self, child: Child) -> set[int]:
        """The living processes that stem from `child`, daemons included.

        Its descendants, its session, and all that carry its mark. When nothing else of ours runs, everything
        below us: even what wiped its environment. What is spared is nobody's, and so is what was left.
        """
        table = processes.living()
        spared = self.spared | self._left_now(table)
        all_ours = processes.below(os.getpid(), table) - spared
        if all(other is child for other in self._children.values()):
            return all_ours
        found = {pid for pid, process in table.items() if process.session == child.pid}
        found |= {child.pid} & table.keys()
        for pid in tuple(found):
            found |= processes.below(pid, table)
        suspects = (all_ours if self._adopts else table.keys()) - found - self._children.keys()
        return (found | {pid for pid in suspects if processes.marked(pid, child.mark)}) - spared

    def leave(self, child: Child) -> None:
        """What still lives of the tree of `child`, which has ended, is let live: see `wire.RUN`."""
        left = self.tree(child)
        if left:
            self._left |= left
            self._left_marks.add(child.mark)

    def _left_now(self, table: dict[int, processes.Process]) -> set[int]:
        """Those that were left, and what they have started since."""
        if self._left_marks:
            self._left &= table.keys()
            marks = self._left_marks
            self._left |= {pid for pid in table if any(processes.marked(pid, mark) for mark in marks)}
            for pid in tuple(self._left):
                self._left |= processes.below(pid, table)
        return self._left

    def spare(self, patterns: Sequence[str]) -> None:
        """Those of everybody whose command line is of one of these outlive whatever ends, but for us."""
        if patterns:
            self.spared = frozenset(pid for pid in self.everybody() if processes.is_of(pid, patterns))

    def everybody(self) -> set[int]:
        """Every living process that is ours to end: as the first process of a machine all but ourselves.

        What is spared is among them.
        """
        table = processes.living()
        if os.getpid() == 1:
            return table.keys() - {1}
        found = processes.below(os.getpid(), table)
        if self._adopts:
            return found
        return found | {pid for pid in table.keys() - found if processes.marked(pid, self._mark)}

    def end(self, child: Child, then: Callable[[], object]) -> None:
        """Kill the tree of `child`, then call: at most CLEAR_SECONDS later."""
        self._clear(lambda: self.tree(child), self._kill, lambda _: then())

    def end_all(self, then: Callable[[set[int]], object]) -> None:
        """Kill everybody but the spared; `then` gets what would not die within CLEAR_SECONDS."""
        strike = self._kill if self.spared else _kill_everybody
        self._clear(lambda: self.everybody() - self.spared, strike, then)

    def end_all_now(self) -> None:
        """The same, waiting, without the loop: the last thing that the driver does."""
        until = time.monotonic() + CLEAR_SECONDS
        while (left := self.everybody()) and time.monotonic() < until:
            _kill_everybody(left)
            time.sleep(ROUND_SECONDS)
            self._collect()

    def _clear(
        self,
        find: Callable[[], set[int]],
        strike: Callable[[set[int]], object],
        then: Callable[[set[int]], object],
    ) -> None:
        until = time.monotonic() + CLEAR_SECONDS

        def another_round() -> None:
            left = find()
            if left and time.monotonic() < until:
                strike(left)
                self._loop.later(ROUND_SECONDS, another_round)
            else:
                then(left)

        another_round()

    def _kill(self, pids: set[int]) -> None:
        processes.kill(pids, self.spared)

    def _reap(self) -> None:
        for child in self._collect():
            child.on_exit(child.exit_code or 0)

    def _collect(self) -> list[Child]:
        ended: list[Child] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            self._left.discard(pid)
            child = self._children.pop(pid, None)
            if child is not None:
                child.exit_code = child.popen.returncode = os.waitstatus_to_exitcode(status)
                ended.append(child)


def _kill_everybody(pids: set[int]) -> None:
    if os.getpid() == 1:
        os.kill(-1, signal.SIGKILL)  # all at once: none can fork away
    else:
        processes.kill(pids)
