"""Capabilities of some providers' sandboxes: being saved with all their processes, and being measured.

Optional, like `Sandbox.reopen`: code that uses snapshots calls `snapshots_of` first.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import anyio

from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.sandboxes.base import Provider, Sandbox, SandboxSpec


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sandbox as it was at one moment: a folder of this machine, without which there is none."""

    folder: Path

    @property
    def size_bytes(self) -> int:
        """Size of its files. Raises OSError."""
        return sum(file.stat().st_size for file in self.folder.iterdir())


class SavedSandbox(Sandbox, Protocol):
    """A sandbox that can be saved."""

    @property
    def max_snapshot_bytes(self) -> int:
        """No snapshot takes more, whatever the sandbox's processes do."""
        ...

    async def snapshot(self, folder: Path) -> Snapshot:
        """Save the sandbox in a new folder, which only the server and the sandbox's user can enter.

        Its processes stop while it is saved, and then go on. `folder` is complete or does not exist, also if
        this is cancelled or the server is killed. What the stream carries at the moment may be in the
        snapshot or not.

        Raises SnapshotError if it cannot be saved; SandboxLostError if it is gone or paused.
        """
        ...


class SnapshotProvider(Provider, Protocol):
    """A provider whose sandboxes can be saved, and opened from what was saved."""

    snapshots: bool

    def open(
        self, spec: SandboxSpec, *, snapshot: Snapshot | None = None
    ) -> AbstractAsyncContextManager[SavedSandbox]:
        """`Provider.open`, or open a copy of the sandbox that was saved.

        Its processes go on where they were, with a new stream, and their files, memory and timers are their
        own: any number of copies and the original do not see each other. Only name and `survives` of `spec`
        may differ from the saved sandbox's.

        Raises SnapshotError if the snapshot is gone, damaged, or of another kind of sandbox, or was made by
        another version of what saves and restores.
        """
        ...


def snapshots_of(provider: Provider) -> SnapshotProvider | None:
    """The provider, if its sandboxes can be saved."""
    return cast("SnapshotProvider", provider) if getattr(provider, "snapshots", False) else None


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
