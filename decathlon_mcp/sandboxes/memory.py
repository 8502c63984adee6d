"""A floor of the machine's memory, below which no sandbox of an agent opens (`MemoryFloor`).

With merging (`--dense`) memory comes back by itself, some time after it was taken. So an episode that needs
more waits, instead of being refused or bringing the machine down.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio

from decathlon_mcp.errors import AtCapacityError

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
