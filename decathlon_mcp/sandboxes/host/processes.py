"""The processes of sandboxes among this machine's processes, and how they are stopped and killed.

They are a sandbox's first process and its descendants. Of other processes nothing is read. A first process
that is one of a PID namespace, or a child subreaper (`payloads.subreaper`), adopts every process that loses
its parent, so that a process of the sandbox cannot leave its descendants. Ancestry comes from the kernel: an
environment, a name or a command line is text that any process can choose, and that can be of any length.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Iterable, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import anyio
from anyio import CapacityLimiter, to_thread
from decathlon_sandbox.process_table import Process, read_file, read_process

SIGNAL_SECONDS = 5.0
"""How long the processes of one sandbox may take to stop or end, from the first signal sent to them."""
STOP_FIRST_SECONDS = 1.0
"""How long a sandbox's processes may take to stop before they are killed as they are."""
CHILDREN_BYTES = 1 << 20
"""Limit on /proc/PID/task/TID/children: about 150,000 children."""
STATUS_BYTES = 1 << 16
"""Limit on /proc/PID/status, of which the kernel writes some 1,500 bytes."""
_STOPPED_STATES, _UNINTERRUPTIBLE_STATE = (b"t", b"T"), b"D"


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
    return process is not None and process.state in _STOPPED_STATES


def is_namespace_init(process_id: ProcessId) -> bool:
    """Whether a process is the first one of a PID namespace, which the kernel kills with it."""
    numbers = (read_file(process_id.pid, "status", STATUS_BYTES) or b"").partition(b"\nNSpid:")[2]
    own, _, inner = numbers.partition(b"\n")[0].strip().rpartition(b"\t")
    return bool(own) and inner == b"1" and process_id.read() is not None


def is_alive(process_id: ProcessId | None) -> bool:
    """Whether a process has not ended yet."""
    process = None if process_id is None else process_id.read()
    return process is not None and not process.ended


@dataclass(slots=True, eq=False)
class SignalJob:
    """Stopping, or killing, the processes of one sandbox."""

    root: ProcessId | None
    kill: bool
    done: bool | None = None
    """None as long as it is not decided."""
    woken: anyio.Event = field(default_factory=anyio.Event)
    """Set when `done` is, or when the waiting task is to make the rounds."""
    round_count: int = 0
    started_at: float = 0.0
    known: set[ProcessId] = field(default_factory=set[ProcessId])
    stop_sent: set[ProcessId] = field(default_factory=set[ProcessId])

    def advance(self, now: float) -> None:
        """Send the signals that are due, and decide whether the job is done."""
        self.started_at = self.started_at or now
        self.round_count += 1
        if self.kill and self.root is not None and is_namespace_init(self.root):
            # The kernel kills the others with it, also if this server dies before its next signal.
            _send(signal.SIGKILL, (self.root,))
        members = living_members(self.root, self.known)
        self.known |= members.keys()
        # A process acts on the signal before it can start another process, and an uninterruptible process
        # before it can do anything else.
        unstopped = [
            process_id
            for process_id, process in members.items()
            if not (
                process.state in _STOPPED_STATES
                or (process_id in self.stop_sent and (self.kill or process.state == _UNINTERRUPTIBLE_STATE))
            )
        ]
        if not (members if self.kill else unstopped):
            self.done = True
        elif now - self.started_at > SIGNAL_SECONDS:
            self.done = False
        # All are stopped before one is killed: a stopped process cannot start others meanwhile.
        elif not self.kill or (unstopped and now - self.started_at < STOP_FIRST_SECONDS):
            _send(signal.SIGSTOP, unstopped)
            self.stop_sent.update(unstopped)
        else:
            # The first process is the last: it adopts what loses its parent.
            _send(signal.SIGKILL, members.keys() - {self.root} or members)


class ProcessSignaller:
    """Stops and kills the processes of sandboxes, in one thread for all of them."""

    def __init__(self) -> None:
        self._jobs: list[SignalJob] = []
        self._leader: SignalJob | None = None
        self._thread = CapacityLimiter(1)

    async def stop(self, root: ProcessId | None) -> bool:
        """Stop all processes (SIGSTOP), also if forked meanwhile; whether all have stopped."""
        return await self._run(SignalJob(root, kill=False))

    async def kill(self, root: ProcessId | None) -> bool:
        """Kill all processes; whether they are gone within `SIGNAL_SECONDS`."""
        return await self._run(SignalJob(root, kill=True))

    async def _run(self, job: SignalJob) -> bool:
        # One waiting task makes the rounds for all jobs. Several hundred sandboxes that end together take
        # hardly more rounds than a single sandbox, and a sandbox whose processes do not end delays no other.
        self._jobs.append(job)
        try:
            while job.done is None:
                if self._leader in (None, job):
                    self._leader = job
                    await self._make_round()
                else:
                    await job.woken.wait()
        finally:
            self._jobs.remove(job)
            if self._leader is job:
                self._leader = next((other for other in self._jobs if other.done is None), None)
                if self._leader is not None:
                    self._leader.woken.set()
        return job.done

    async def _make_round(self) -> None:
        jobs = [job for job in self._jobs if job.done is None]
        await to_thread.run_sync(_advance, jobs, limiter=self._thread)
        for job in jobs:
            if job.done is not None:
                job.woken.set()
        round_count = min((job.round_count for job in self._jobs if job.done is None), default=None)
        if round_count is not None:
            # Most processes are gone after a few rounds.
            await anyio.sleep(min(0.002 * 2 ** min(round_count, 10), 0.05))


def _advance(jobs: Sequence[SignalJob]) -> None:
    for job in jobs:
        job.advance(time.monotonic())


def _send(number: signal.Signals, processes: Iterable[ProcessId]) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            process.send(number)


def read_children(pid: int) -> list[int]:
    """The pids of a process's children; empty if it is gone.

    While children end and are reaped, the kernel may leave out others. Of a stopped process, the list is
    complete.
    """
    try:
        tasks = [task.name for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [
        int(child)
        for task in tasks
        for child in (read_file(pid, f"task/{task}/children", CHILDREN_BYTES) or b"").split()
    ]
