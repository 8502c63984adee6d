"""The processes of a machine as /proc shows them, for the driver and for the provider `host`.

Linux only. Without /proc there are no processes. Every file is read up to a limit: a process without any
privilege can claim an environment or a command line of many gigabytes (PR_SET_MM in prctl(2)).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

from decathlon_sandbox import wire

STAT_BYTES = 4096
"""Limit on /proc/PID/stat, which has 52 numbers and a name, and other files that the kernel fills."""
ENVIRONMENT_BYTES = 1 << 20
"""What is read of an environment. What lies beyond that is not seen."""
COMMAND_LINE_BYTES = 1 << 16
EXECVE_SECONDS = 0.1
"""How long processes are looked at again that are executing a program and so have no environment yet."""
_EXECVE_LOOK_SECONDS = 0.002
_CHUNK_BYTES = 1 << 16
_ENDED_STATES = (b"Z", b"X", b"x")
# linux/sched.h
_PF_EXITING = 0x4
_PF_KTHREAD = 0x200000


class Process:
    """A process at one moment: fields of /proc/PID/stat. `started_ticks`: its start, in clock ticks."""

    __slots__ = ("flags", "parent", "pid", "session", "started_ticks", "state", "thread_count")

    def __init__(self, pid: int, stat: bytes) -> None:
        # The second field is the program's name in parentheses, and may contain both spaces and parentheses.
        state, parent, _group, session, _tty, _foreground, flags, *rest = stat.rpartition(b")")[2].split()
        self.pid = pid
        self.parent = int(parent)
        self.session = int(session)
        self.state = state
        self.flags = int(flags)
        self.thread_count = int(rest[10])
        self.started_ticks = int(rest[12])

    @property
    def ended(self) -> bool:
        # A process whose main thread has exited looks like a zombie as long as its other threads run.
        return self.main_thread_ended and self.thread_count <= 1

    @property
    def main_thread_ended(self) -> bool:
        return self.state in _ENDED_STATES

    @property
    def exiting(self) -> bool:
        return self.flags & _PF_EXITING != 0

    @property
    def of_kernel(self) -> bool:
        """Whether it is a thread of the kernel."""
        return self.flags & _PF_KTHREAD != 0


def read_processes() -> dict[int, Process]:
    """All processes by pid, zombies included. Takes about 30 µs for each."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return {}
    return {pid: process for pid in pids if (process := read_process(pid)) is not None}


def read_process(pid: int) -> Process | None:
    """None if there is no such process."""
    stat = read_file(pid, "stat", STAT_BYTES)
    return Process(pid, stat) if stat else None


def read_environment(process: Process) -> bytes | None:
    """The beginning of the environment of a process, as it was given to its program or as it has changed it.

    Empty if it has none or may not be inspected; None in the middle of execve(2), when it cannot be read.
    """
    if process.of_kernel:
        return b""
    pid = process.pid
    if process.main_thread_ended:
        # Only the other threads still have its memory, all the same memory.
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:  # it has been reaped meanwhile
            return b""
        found = (read_file(pid, f"task/{task}/environ", ENVIRONMENT_BYTES) for task in tasks)
        return next(filter(None, found), b"")
    environment = read_file(pid, "environ", ENVIRONMENT_BYTES)
    if environment or environment is None or process.exiting:
        return environment or b""
    # In execve(2) a process has neither environment nor command line for a moment.
    if not _has_command_line(pid):
        return None
    # Read again: execve(2) may have ended after the first look. And looked at again: a script's interpreter
    # is executed right after its `env`, so that the second look may be in the next execve(2).
    environment = read_file(pid, "environ", ENVIRONMENT_BYTES)
    if environment or environment is None or _has_command_line(pid):
        return environment or b""
    return None


def _has_command_line(pid: int) -> bool:
    """Whether the process has one, or is gone."""
    return read_file(pid, "cmdline", 1) != b""


def read_file(pid: int, name: str, limit_bytes: int) -> bytes | None:
    """The beginning of a file of /proc/PID; None if the process is gone or may not be inspected."""
    content = b""
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            # The kernel may answer with less than there is.
            while len(content) < limit_bytes and (
                chunk := file.read(min(limit_bytes - len(content), _CHUNK_BYTES))
            ):
                content += chunk
    except OSError:
        return None
    return content


def children_by_parent(processes: Iterable[Process]) -> dict[int, list[int]]:
    """The pids of the children of each parent."""
    children: dict[int, list[int]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process.pid)
    return children


def descendants(roots: Iterable[int], children: Mapping[int, Iterable[int]]) -> set[int]:
    """The descendants of some processes, without these processes."""
    excluded = set(roots)
    found = set(excluded)
    pending = list(excluded)
    while pending:
        new = set(children.get(pending.pop(), ())) - found
        found |= new
        pending += new
    return found - excluded


def marked_processes(processes: Iterable[Process], marks: Iterable[str]) -> set[int]:
    """The pids of the processes whose MARK_VARIABLE starts with one of the marks."""
    # During execve(2) an environment cannot be read, and under load that moment is long. Without a second
    # look, a daemon that was just executing its program survived its run.
    prefixes = [f"\0{wire.MARK_VARIABLE}={mark}".encode() for mark in marks]
    marked: set[int] = set()
    deadline = time.monotonic() + EXECVE_SECONDS
    undecided = list(processes)
    while undecided:
        again: list[int] = []
        for process in undecided:
            environment = read_environment(process)
            if environment is None:
                again.append(process.pid)
            elif any(prefix in b"\0" + environment for prefix in prefixes):
                marked.add(process.pid)
        if not again or time.monotonic() > deadline:
            break
        time.sleep(_EXECVE_LOOK_SECONDS)
        undecided = [process for pid in again if (process := read_process(pid)) is not None]
    return marked


def matches_command(pid: int, patterns: Iterable[str]) -> bool:
    """Whether the command line of `pid` matches one of the patterns, as `freeze` in `wire` defines it."""
    command_line = read_file(pid, "cmdline", COMMAND_LINE_BYTES)
    if command_line is None:
        return False
    argv = command_line.rstrip(b"\0").decode("utf-8", "replace").split("\0")
    with_folder, without_folder = " ".join(argv), " ".join([os.path.basename(argv[0]), *argv[1:]])
    return any(_matches(with_folder, pattern) or _matches(without_folder, pattern) for pattern in patterns)


def _matches(text: str, pattern: str) -> bool:
    # Not `fnmatch`: it would be imported from a file system that the agent may have changed by now.
    head, *parts = pattern.split("*")
    if not parts:
        return text == pattern
    if not text.startswith(head):
        return False
    position = len(head)
    for part in parts[:-1]:
        position = text.find(part, position) + len(part)
        if position < len(part):
            return False
    return len(text) - position >= len(parts[-1]) and text.endswith(parts[-1])
