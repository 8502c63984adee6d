"""The processes of this machine as /proc shows them, and which of them belong to a local sandbox."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self, TypeVar

MARKER_VARIABLE = "DECATHLON_SANDBOX"
"""In the environment of processes of a sandbox: `<label>/<name>`, see `ProcessProvider.label`."""

_MARKER = re.compile(rb"(?:^|\0)" + MARKER_VARIABLE.encode() + rb"=([^\0/]*)/([^\0]*)")
_STOPPED_STATES = frozenset("tT")
_ENDED_STATES = frozenset("ZXx")
_UNINTERRUPTIBLE_STATE = "D"
# linux/sched.h
_PF_EXITING = 0x4
_PF_KTHREAD = 0x200000
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identifies a process among all since the machine's start; a pid alone is used again.

    `started_ticks` is the time of its start in clock ticks (field 22 of /proc/PID/stat).
    """

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """None if there is no such process."""
        process = _read_process(pid)
        return process and cls(process.id.pid, process.id.started_ticks)


@dataclass(frozen=True, slots=True)
class Process:
    """A row of the table."""

    id: ProcessId
    parent: int
    session: int
    state: str
    flags: int
    thread_count: int

    @property
    def ended(self) -> bool:
        # A process whose main thread has exited looks like a zombie as long as its other threads run.
        return self.state in _ENDED_STATES and self.thread_count <= 1

    @property
    def stopped(self) -> bool:
        return self.state in _STOPPED_STATES

    @property
    def uninterruptible(self) -> bool:
        return self.state == _UNINTERRUPTIBLE_STATE


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """Identifies all processes of one sandbox.

    They have the marker `<owner>/<name>`, belong to the session of `leader`, or descend from such. A process
    that drops its environment and leaves both its session and its parents is not found. `leader` is the
    sandbox's first process.
    """

    owner: str
    name: str
    leader: ProcessId | None = None


class ProcessTable:
    """One reading of /proc: every process of this machine but the server itself."""

    # Reading takes about 30 µs a process, so everything that is needed at the same time shares one table.

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self._processes = processes

    @classmethod
    def read(cls) -> Self:
        own = os.getpid()
        pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208
        return cls({pid: process for pid in pids if pid != own and (process := _read_process(pid))})

    def members(self, tree: ProcessTree, known: Set[ProcessId] = frozenset()) -> dict[ProcessId, Process]:
        """The living processes of a sandbox; `known` were members of it in an earlier table."""
        found = {process.pid for process in known if self._has(process)}
        if tree.leader is not None and self._has(tree.leader):
            found |= {tree.leader.pid, *self._by_session.get(tree.leader.pid, ())}
        found |= self._environments.by_marker.get(f"{tree.owner}/{tree.name}", set())
        pending = list(found)
        while pending:
            children = self._by_parent.get(pending.pop(), set()) - found
            found |= children
            pending += children
        processes = (self._processes[pid] for pid in found)
        return {process.id: process for process in processes if not process.ended}

    @property
    def markers(self) -> Set[str]:
        """`<owner>/<name>` of all sandboxes that have a process with its marker."""
        return self._environments.by_marker.keys()

    @property
    def has_undecided(self) -> bool:
        """Whether a process may have a marker that could not be read at this moment."""
        return self._environments.undecided

    def _has(self, process: ProcessId) -> bool:
        row = self._processes.get(process.pid)
        return row is not None and row.id == process

    @cached_property
    def _by_session(self) -> Mapping[int, set[int]]:
        return _group((process.session, pid) for pid, process in self._processes.items())

    @cached_property
    def _by_parent(self) -> Mapping[int, set[int]]:
        return _group((process.parent, pid) for pid, process in self._processes.items())

    @cached_property
    def _environments(self) -> _Environments:
        found: list[tuple[str, int]] = []
        undecided = False
        for pid, process in self._processes.items():
            if process.ended or process.flags & _PF_KTHREAD:
                continue
            # The kernel locks the memory of the process for this, and one that hangs with its memory locked
            # would block the reader for good. Such a process is uninterruptible.
            environment = None if process.uninterruptible else _read_environment(process)
            if environment is None:
                undecided = True
            elif match := _MARKER.search(environment):
                found.append(((match[1] + b"/" + match[2]).decode("utf-8", "replace"), pid))
        return _Environments(_group(found), undecided)


@dataclass(frozen=True, slots=True)
class _Environments:
    by_marker: Mapping[str, set[int]]
    undecided: bool


def _group(pairs: Iterable[tuple[_Key, int]]) -> Mapping[_Key, set[int]]:
    groups: dict[_Key, set[int]] = {}
    for key, pid in pairs:
        groups.setdefault(key, set()).add(pid)
    return groups


def sandboxes_with_processes(owner: str, table: ProcessTable | None = None) -> set[str]:
    """Names of this owner's sandboxes that have a process."""
    markers = (table or ProcessTable.read()).markers
    return {name for marker in markers for of, _, name in (marker.partition("/"),) if of == owner}


def is_stopped(process_id: ProcessId) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP)."""
    process = _read_process(process_id.pid)
    return process is not None and process.id == process_id and process.stopped


def _read_process(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, and may contain both spaces and parentheses.
    state, parent, _group, session, _tty, _foreground, flags, *rest = text.rpartition(")")[2].split()
    thread_count, started_ticks = int(rest[10]), int(rest[12])
    return Process(ProcessId(pid, started_ticks), int(parent), int(session), state, int(flags), thread_count)


def _read_environment(process: Process) -> bytes | None:
    """Environment of a living process; empty if it may not be read, None in the middle of execve(2)."""
    pid = process.id.pid
    if process.state in _ENDED_STATES:
        # Its main thread has exited, and only the other threads still have its memory.
        try:
            return b"".join(_read(file) for file in Path(f"/proc/{pid}/task").glob("*/environ"))
        except OSError:  # it has been reaped meanwhile
            return b""
    folder = Path(f"/proc/{pid}")
    try:
        if environment := (folder / "environ").read_bytes():
            return environment
        if process.flags & _PF_EXITING:
            return b""
        # Read again: execve(2) may have ended after the first look. And looked at again: a script's
        # interpreter is executed right after its `env`, so that the second look may be in the next execve(2).
        if (folder / "cmdline").read_bytes():
            environment = (folder / "environ").read_bytes()
            if environment or (folder / "cmdline").read_bytes():
                return environment
    except OSError:
        return b""
    return None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
