"""Which of this machine's processes belong to a local sandbox."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Self, TypeVar

from decathlon_sandbox import wire
from decathlon_sandbox.processes import (
    Process,
    children_by_parent,
    descendants,
    read_environment,
    read_process,
    read_processes,
)

# In the environment of processes of a sandbox: `<label>/<name>`, see `ProcessProvider.label`.
_MARKER = re.compile(rb"(?:^|\0)" + wire.SANDBOX_VARIABLE.encode() + rb"=([^\0/]*)/([^\0]*)")
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
        process = read_process(pid)
        return None if process is None else cls.of_process(process)

    @classmethod
    def of_process(cls, process: Process) -> Self:
        return cls(process.pid, process.started_ticks)


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

    # Reading takes long, so everything that is needed at the same time shares one table.

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self._processes = processes

    @classmethod
    def read(cls) -> Self:
        processes = read_processes()
        processes.pop(os.getpid(), None)
        return cls(processes)

    def members(self, tree: ProcessTree, known: Set[ProcessId] = frozenset()) -> dict[ProcessId, Process]:
        """The living processes of a sandbox; `known` were members of it in an earlier table."""
        found = {process.pid for process in known if self._has(process)}
        if tree.leader is not None and self._has(tree.leader):
            found |= {tree.leader.pid, *self._by_session.get(tree.leader.pid, ())}
        found |= self._environments.by_marker.get(f"{tree.owner}/{tree.name}", set())
        found |= descendants(found, self._by_parent)
        processes = (self._processes[pid] for pid in found)
        return {ProcessId.of_process(process): process for process in processes if not process.ended}

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
        return row is not None and row.started_ticks == process.started_ticks

    @cached_property
    def _by_session(self) -> Mapping[int, set[int]]:
        return _group((process.session, pid) for pid, process in self._processes.items())

    @cached_property
    def _by_parent(self) -> Mapping[int, list[int]]:
        return children_by_parent(self._processes.values())

    @cached_property
    def _environments(self) -> _Environments:
        found: list[tuple[str, int]] = []
        undecided = False
        for pid, process in self._processes.items():
            if process.ended or process.of_kernel:
                continue
            # The kernel locks the memory of the process for this, and one that hangs with its memory locked
            # would block the reader for good. Such a process is uninterruptible.
            environment = None if process.uninterruptible else read_environment(process)
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


def sandboxes_with_processes(owner: str) -> set[str]:
    """Names of this owner's sandboxes that have a process."""
    markers = (marker.partition("/") for marker in ProcessTable.read().markers)
    return {name for of, _, name in markers if of == owner}


def is_stopped(process_id: ProcessId) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP)."""
    process = read_process(process_id.pid)
    return process is not None and ProcessId.of_process(process) == process_id and process.stopped
