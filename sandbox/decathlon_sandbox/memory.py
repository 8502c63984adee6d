"""Ends processes when the sandbox's memory is short, in a sandbox whose kernel does not.

gVisor's kernel has no limit of its own: the machine's kernel would end it as a whole, the driver included. So
the driver, which must be the sandbox's first process, looks at the memory in use. If that exceeds the limit,
it stops all processes, kills the largest, and lets the others go on. It looks again after the time that the
fastest writer needs to fill what is free.
"""

from __future__ import annotations

import os
import signal

from decathlon_sandbox import wire
from decathlon_sandbox.event_loop import EventLoop
from decathlon_sandbox.process_table import STAT_BYTES, read_file, read_processes

FILL_BYTES_PER_SECOND = 2 << 30
"""How fast processes fill memory, at most: what two cores can write to pages that are new to them."""
MIN_SECONDS, MAX_SECONDS = 0.02, 2.0
"""Between two looks, each of which takes some 0.2 ms."""
RELEASE_SECONDS = 0.05
"""Between two looks while memory is short. What a killed process had is usually free 20 ms later."""
LOOKS_A_ROUND = 6
"""More processes are killed only if memory is still short after so many looks."""
SPARING_ROUNDS, LAST_ROUND = 3, 8
"""After so many rounds the task's servers are killed too, and in the end the driver: then what fills the
memory belongs to no process but to files and segments. Linux would end it too."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryLimit:
    """A limit on the memory of all processes, files and segments together."""

    def __init__(self, loop: EventLoop, limit_bytes: int) -> None:
        self._loop = loop
        self._limit_bytes = limit_bytes
        self._short_looks = 0
        """Looks since memory has been short; then all processes are stopped."""

    def look(self) -> None:
        """Do what the memory in use requires, and look again later."""
        free = self._limit_bytes - used_bytes()
        if free > 0:
            if self._short_looks:
                signal_all(signal.SIGCONT)
            self._short_looks = 0
            seconds = min(max(free / FILL_BYTES_PER_SECOND, MIN_SECONDS), MAX_SECONDS)
        else:
            # Also processes that were started while the signal was sent to the others.
            signal_all(signal.SIGSTOP)
            finished_rounds, looks = divmod(self._short_looks, LOOKS_A_ROUND)
            if looks == 0:
                if finished_rounds == LAST_ROUND:
                    os._exit(wire.OUT_OF_MEMORY_EXIT)
                kill_largest_processes(-free, finished_rounds)
            self._short_looks += 1
            seconds = RELEASE_SECONDS
        self._loop.call_later(seconds, self.look)


def used_bytes() -> int:
    """Memory in use, as the kernel counts it."""
    with open("/proc/meminfo", "rb") as file:
        fields = dict(line.split(b":", 1) for line in file)
    total, free = (int(fields[name].split()[0]) for name in (b"MemTotal", b"MemFree"))
    return (total - free) << 10


def signal_all(number: int) -> None:
    """Send a signal to all processes but this first process."""
    try:
        os.kill(-1, number)
    except ProcessLookupError:
        pass  # there are none


def kill_largest_processes(excess_bytes: int, finished_rounds: int) -> None:
    """Kill processes that have this much memory together, but not this process.

    What they share is counted for each of them; so in later rounds less is expected of each. The task's
    servers are this process's children, and spared in the first rounds.
    """
    found: list[tuple[int, int]] = []
    for pid, process in read_processes().items():
        # Besides the first process, processes without a parent inside are the provider's, which copy files.
        if pid == os.getpid() or process.parent == 0 or process.ended:
            continue
        if finished_rounds < SPARING_ROUNDS and process.parent == os.getpid():
            continue
        statm = (read_file(pid, "statm", STAT_BYTES) or b"").split()
        found.append((int(statm[1]) * _PAGE_BYTES if len(statm) > 1 else 0, pid))
    for size, pid in sorted(found, reverse=True):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
        excess_bytes -= size >> 2 * finished_rounds
        if excess_bytes < 0:
            break
