"""Stops and kills the processes of sandboxes of this machine, of any number of sandboxes together."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import anyio
from anyio import CapacityLimiter, to_thread

from decathlon_mcp.sandboxes.host.table import ProcessId, living_members

SIGNAL_SECONDS = 5.0
"""How long the processes of one sandbox may take to stop or end, from the first signal sent to them."""
STOP_FIRST_SECONDS = 1.0
"""How long a sandbox's processes may take to stop before they are killed as they are."""


@dataclass(slots=True, eq=False)
class _Job:
    """Stopping, or killing, the processes of one sandbox.

    `root`: its first process. `done` is None as long as it is not decided; `woken` is set then, or when the
    task that waits for it is to make the rounds.
    """

    root: ProcessId | None
    kill: bool
    done: bool | None = None
    woken: anyio.Event = field(default_factory=anyio.Event)
    round_count: int = 0
    started_at: float = 0.0
    known: set[ProcessId] = field(default_factory=set[ProcessId])
    stop_sent: set[ProcessId] = field(default_factory=set[ProcessId])

    def advance(self, now: float) -> None:
        """Send the signals that are due, and decide whether the job is done."""
        self.started_at = self.started_at or now
        self.round_count += 1
        members = living_members(self.root, self.known)
        self.known |= members.keys()
        # A process acts on the signal before it can start another one, and an uninterruptible process before
        # it can do anything else.
        unstopped = [
            process_id
            for process_id, process in members.items()
            if not (
                process.stopped or (process_id in self.stop_sent and (self.kill or process.uninterruptible))
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
        self._jobs: list[_Job] = []
        self._leader: _Job | None = None
        self._thread = CapacityLimiter(1)

    async def stop(self, root: ProcessId | None) -> bool:
        """Stop all processes (SIGSTOP), including those that are forked meanwhile; whether they have."""
        return await self._run(_Job(root, kill=False))

    async def kill(self, root: ProcessId | None) -> bool:
        """Kill all processes; whether they are gone within `SIGNAL_SECONDS`."""
        return await self._run(_Job(root, kill=True))

    async def _run(self, job: _Job) -> bool:
        # One waiting task makes the rounds for all jobs. Several hundred sandboxes that end together take
        # hardly more rounds than one, and one whose processes do not end delays no other.
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


def _advance(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        job.advance(time.monotonic())


def _send(number: signal.Signals, processes: Iterable[ProcessId]) -> None:
    for process in processes:
        try:
            process.send(number)
        except (ProcessLookupError, PermissionError):
            continue
