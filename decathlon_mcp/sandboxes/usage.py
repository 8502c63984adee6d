"""What a sandbox uses of its share: an optional capability, asked for only when other sandboxes fail too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import anyio

from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.sandboxes.base import Sandbox

FULL = 0.95
"""The part of a limit from which on a sandbox counts as over its share: at the limit itself the kernel has
already taken something back."""
MEASURE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Parts of what a sandbox may have, 1.0 being all of it; None where that is not known or not limited.

    `disk` is the part of the disk's fair share: its size divided by the number of sandboxes.
    """

    memory: float | None = None
    pids: float | None = None
    disk: float | None = None

    def over(self) -> str | None:
        """The resource of which it has more than its share; None if there is none."""
        parts = {"memory": self.memory, "processes": self.pids, "disk": self.disk}
        return next((name for name, part in parts.items() if part is not None and part >= FULL), None)


class MeasuredSandbox(Sandbox, Protocol):
    """A sandbox that can be measured from outside."""

    async def usage(self, sandboxes: int) -> Usage:
        """`sandboxes`: how many share the disk. Raises DecathlonError, OSError."""
        ...


async def over_share(sandbox: Sandbox, sandboxes: int) -> str | None:
    """The resource of which a sandbox has more than its share; None also if it cannot be measured in time."""
    usage = await _usage(sandbox, sandboxes)
    return None if usage is None else usage.over()


async def fills_disk(sandbox: Sandbox, sandboxes: int) -> bool:
    """Whether a sandbox has more than its share of the disk; false also if it cannot be measured in time."""
    usage = await _usage(sandbox, sandboxes)
    return usage is not None and Usage(disk=usage.disk).over() is not None


async def _usage(sandbox: Sandbox, sandboxes: int) -> Usage | None:
    if not hasattr(sandbox, "usage"):
        return None
    with anyio.move_on_after(MEASURE_SECONDS):
        try:
            return await cast("MeasuredSandbox", sandbox).usage(sandboxes)
        except (DecathlonError, OSError):
            return None
    return None
