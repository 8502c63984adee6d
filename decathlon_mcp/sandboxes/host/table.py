"""Which of this machine's processes belong to a sandbox: its first process and its descendants.

Of other processes nothing is read. A first process that is one of a PID namespace, or a child subreaper
(`payloads.subreaper`), adopts whoever loses its parent, so that a process of the sandbox cannot leave its
descendants. Ancestry comes from the kernel: an environment, a name or a command line is text that any process
can choose, and that can be of any length.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from decathlon_sandbox.processes import Process, read_children, read_process


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

    def read(self) -> Process | None:
        """The process as it is now; None if it is gone."""
        process = read_process(self.pid)
        return process if process is not None and process.started_ticks == self.started_ticks else None

    def child(self, pid: int) -> ProcessId | None:
        """The child with this number; None if it has none."""
        process = read_process(pid)
        is_child = process is not None and process.parent == self.pid and self.read() is not None
        return ProcessId.of_process(process) if process is not None and is_child else None

    @contextmanager
    def opened(self) -> Generator[int]:
        """A descriptor of the process (pidfd_open(2)). Raises ProcessLookupError if it is gone."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            raise ProcessLookupError(f"process {self.pid} has ended") from None
        try:
            # Looked at after the descriptor is open: the number may belong to another process by now.
            if self.read() is None:
                raise ProcessLookupError(f"process {self.pid} has ended")
            yield pidfd
        finally:
            os.close(pidfd)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process and to no other. Raises ProcessLookupError, PermissionError."""
        with self.opened() as pidfd:
            signal.pidfd_send_signal(pidfd, number)


def living_members(root: ProcessId | None, known: Set[ProcessId] = frozenset()) -> dict[ProcessId, Process]:
    """The living processes of a sandbox: its first process `root`, and all that descends from it.

    `known` were members of it earlier; who loses its parent because `root` has ended is found by them. While
    processes start and end, some may be missing; while `root` is stopped, none that it has adopted.
    """
    found: dict[int, Process] = {}
    for process_id in (*known, *(() if root is None else (root,))):
        if (process := process_id.read()) is not None:
            found[process_id.pid] = process
    pending = list(found)
    while pending:
        for pid in read_children(pending.pop()):
            process = None if pid in found else read_process(pid)
            # The number may belong to another process by now, whose parent is none of these.
            if process is not None and process.parent in found:
                found[pid] = process
                pending.append(pid)
    return {ProcessId.of_process(process): process for process in found.values() if not process.ended}


def is_stopped(process_id: ProcessId) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP)."""
    process = process_id.read()
    return process is not None and process.stopped


def is_alive(process_id: ProcessId | None) -> bool:
    """Whether a process has not ended yet."""
    process = None if process_id is None else process_id.read()
    return process is not None and not process.ended
