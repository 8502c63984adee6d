"""Snapshots: sandboxes that were saved with all their processes, and from which copies can be opened.

An optional capability of a provider, like `Sandbox.reopen`: its users ask `snapshots_of` first.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

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
        may differ from those of the sandbox that was saved.

        Raises SnapshotError if the snapshot is gone, damaged, or of another kind of sandbox, or was made by
        another version of what saves and restores.
        """
        ...


def snapshots_of(provider: Provider) -> SnapshotProvider | None:
    """The provider, if its sandboxes can be saved."""
    return cast("SnapshotProvider", provider) if getattr(provider, "snapshots", False) else None
