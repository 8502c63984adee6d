"""Limits of a machine that all of its sandboxes share: limits of its kernel, and its memory.

The kernel counts processes and keys for each user or for the whole machine, open files for each process: the
server's. Sandboxes that run as root are one user for it, in containers too, so that one
sandbox can use up what the others need.

With merging (`--merge-pages`) memory comes back by itself, some time after it was taken. So an episode that
needs more waits, instead of being refused or bringing the machine down.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from decathlon_mcp.errors import AtCapacityError, SettingsError
from decathlon_mcp.sandboxes.base import Finding, finding

SYSCTL_FOLDER = Path("/proc/sys")
SERVER_DESCRIPTORS = 128
"""File descriptors that the server needs besides sandboxes and connections: its own, and openings in
progress. Measured: 30, and 15 for an opening."""
DESCRIPTORS_PER_SANDBOX = 8
"""Measured: 3 in a container, 4 without isolation, 5 in namespaces. Besides, a grader's sandbox opens while
the agent's closes, and an episode has a log."""
CONNECTIONS_PER_EPISODE = 2
"""Each is one descriptor. A client has a connection for its requests and a connection for a stream."""
CONNECTIONS_SHARE = 0.75
"""Share of the descriptors that connections may use; the rest is for sandboxes."""


@dataclass(frozen=True, slots=True)
class SharedLimit:
    """A sysctl, and how much of it one ordinary sandbox uses."""

    name: str
    per_sandbox: int


# What several MCP servers and a program of the agent need; an agent that tries can use up any of them.
SHARED_LIMITS = (
    SharedLimit("fs.inotify.max_user_instances", 2),
    SharedLimit("fs.inotify.max_user_watches", 1024),
    SharedLimit("kernel.pid_max", 64),
    SharedLimit("kernel.threads-max", 64),
    SharedLimit("fs.file-max", 256),
    SharedLimit("kernel.keys.root_maxkeys", 2),
    SharedLimit("user.max_pid_namespaces", 1),
    SharedLimit("user.max_mnt_namespaces", 1),
    SharedLimit("user.max_net_namespaces", 1),
    SharedLimit("user.max_ipc_namespaces", 1),
    SharedLimit("user.max_uts_namespaces", 1),
)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of this process's descriptors to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptors_for(max_sandboxes: int) -> int:
    """How many descriptors a server needs for that many episodes with a sandbox, and their clients."""
    return SERVER_DESCRIPTORS + (DESCRIPTORS_PER_SANDBOX + CONNECTIONS_PER_EPISODE) * max_sandboxes


def require_descriptors() -> None:
    """Raise SettingsError if this process may not open enough files to serve one episode."""
    # It would start, refuse the connections of its clients, and let the open episodes wait for ever.
    if (limit := _descriptors()) < (needed := descriptors_for(1)):
        raise SettingsError(
            f"this process may open {limit:g} files, and a server needs at least {needed}: ulimit -n {needed}"
        )


def max_connections() -> float:
    """How many connections this process's limit has room for, beside its sandboxes."""
    return max(1, (_descriptors() - SERVER_DESCRIPTORS) * CONNECTIONS_SHARE)


def max_sandboxes_beside(connections: int) -> float:
    """How many sandboxes this process's limit has room for, beside so many connections; at least one."""
    remaining = _descriptors() - SERVER_DESCRIPTORS - connections
    return max(1, remaining / DESCRIPTORS_PER_SANDBOX)


def _descriptors(*, hard: bool = False) -> float:
    """The limit of this process's descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[int(hard)]
    return math.inf if limit == resource.RLIM_INFINITY else limit


def check_kernel_limits(max_sandboxes: int, folder: Path = SYSCTL_FOLDER) -> Finding:
    """Whether this machine's limits suffice for so many ordinary sandboxes. Skips unreadable limits."""
    low: list[tuple[str, int, int]] = []
    for limit in SHARED_LIMITS:
        value, needed = _read(folder / limit.name.replace(".", "/")), limit.per_sandbox * max_sandboxes
        if value is not None and value < needed:
            low.append((limit.name, value, needed))
    # The hard limit: a server raises its soft limit to that.
    hard, descriptors = _descriptors(hard=True), descriptors_for(max_sandboxes)
    cures = [f"sysctl -w {name}={needed}" for name, _, needed in low]
    if hard < descriptors:
        low.append(("open files of the server", int(hard), descriptors))
        cures.append(f"ulimit -Hn {descriptors} (LimitNOFILE={descriptors} in a systemd unit)")
    details = ", ".join(f"{name} is {value}, {needed} are needed" for name, value, needed in low)
    return finding(
        "kernel limits",
        not low,
        details or f"suffice for {max_sandboxes} sandboxes",
        f"{'; '.join(cures)}; or fewer sandboxes (--max-sandboxes)",
        required=False,
    )


def _read(file: Path) -> int | None:
    try:
        return int(file.read_text("ascii"))
    except (OSError, ValueError):
        return None


MERGING_FLOOR_MIB = 1024
"""Floor with `--dense`: four set-ups at once, of four servers with 60 MiB each."""
STALLED_SECONDS = 300.0
"""Time in which nobody passes after which waiting episodes are refused. Merging looks at every page twice,
which takes a minute or two with a thousand sandboxes."""
MEMORY_INTERVAL_SECONDS = 0.5
"""How often memory is looked at while it is low, and the time between two that pass then: what the first one
takes must be seen before the second."""
MEMORY_FILE = Path("/proc/meminfo")


class MemoryFloor:
    """Lets callers wait for available memory, in order, while there is less than `floor_bytes`.

    With 0 nobody waits. `read` returns the machine's available memory in bytes, or None if it is unknown,
    which counts as enough.
    """

    def __init__(self, floor_bytes: int = 0, read: Callable[[], int | None] | None = None) -> None:
        self.floor_bytes = floor_bytes
        self.waiting = 0
        """Number of callers that wait."""
        self._read = read or available_bytes
        self._turn = anyio.Lock()
        self._passed_at = 0.0

    @property
    def is_low(self) -> bool:
        """Whether a caller would have to wait now."""
        return self.waiting > 0 or not self._is_enough()

    async def wait(self) -> None:
        """Return when there is enough memory.

        Raises AtCapacityError if nobody could pass for STALLED_SECONDS.
        """
        if not self.is_low:
            return
        if not self.waiting:
            self._passed_at = anyio.current_time()
        self.waiting += 1
        try:
            # The others wait for the lock, so that one of them looks at the memory.
            async with self._turn:
                await self._wait_until_enough()
        finally:
            self.waiting -= 1

    async def _wait_until_enough(self) -> None:
        while True:
            await anyio.sleep(MEMORY_INTERVAL_SECONDS)
            if self._is_enough():
                self._passed_at = anyio.current_time()
                return
            if anyio.current_time() - self._passed_at > STALLED_SECONDS:
                raise AtCapacityError(
                    f"this machine has {(self._read() or 0) >> 20} MiB of memory available, and needs "
                    f"{self.floor_bytes >> 20} MiB for another sandbox; "
                    "end episodes, or start fewer at once",
                    retryAfterSeconds=30.0,  # an episode has to end first
                )

    def _is_enough(self) -> bool:
        if not self.floor_bytes:
            return True
        available = self._read()
        return available is None or available >= self.floor_bytes


def available_bytes(file: Path = MEMORY_FILE) -> int | None:
    """The memory that new processes of this machine can have without swapping (MemAvailable of proc(5))."""
    try:
        lines = file.read_text("ascii").splitlines()
    except (OSError, ValueError):
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None
