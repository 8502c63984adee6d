"""Saves the states of an episode: its sandbox after a call, from which branches go on.

A state is saved while no call runs, so that it belongs to a call, and after every message to the driver has
arrived. A copy's driver is attached to under a higher generation, as by another server process: tunnels end,
replies to the original's requests are ignored, and the time begins for which it survives without a server.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup
from decathlon_sandbox import wire

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import BadRequestError, DecathlonError, NotRunnableError, SnapshotError
from decathlon_mcp.plugins.branches.options import BranchOptions
from decathlon_mcp.plugins.branches.pauses import CallPauses
from decathlon_mcp.plugins.branches.states import SavedState, SavedStates
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.sandboxes.plugins import saving_options
from decathlon_mcp.sandboxes.snapshots import SavedSandbox, snapshots_of
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.telemetry.logs import fields

STILL_SECONDS = 60.0
"""How long calls that run may take to end before a state is saved; later ones wait for that."""

_log = logging.getLogger("decathlon.episodes")


def why_not_saved(factory: SandboxFactory, states: SavedStates, task: Task) -> str | None:
    """Why states of a task's episodes are not saved on this server; None if they are."""
    if not states.are_saved:
        return "this server saves no states of episodes (`--snapshot-mib 0`)"
    if snapshots_of(factory.provider) is None:
        name = factory.provider.name
        return f"sandboxes of the provider {name} cannot be saved; use {saving_options()}"
    suite = factory.suite
    outside = [*suite.services(task), *(shared.name for shared in suite.shared_resources(task.id))]
    if factory.uses_web(task):
        outside.append("the recorded web")
    if outside:
        return f"a part of the task's state is outside of its sandbox: {', '.join(outside)}"
    return None


async def save_state(
    episode: Episode, folder: Path, at: int, sandbox: SavedSandbox, driver: DriverClient, sealed: Path | None
) -> SavedState:
    """Save the sandbox of an episode after call `at`, while none runs, in a new folder.

    The tools must be offered. Raises SnapshotError, CallTimeoutError, SandboxLostError, OSError.
    """
    # What was sent before has arrived with the answer, and what is sent later would be in the copy too.
    await driver.ping(saving=True)
    with driver.quiet():
        snapshot = await sandbox.snapshot(folder)
    offered = episode.tools.offered
    assert offered is not None
    return SavedState(
        folder=folder,
        at=at,
        provider=episode.sandbox_factory.provider.name,
        wire_version=wire.VERSION,
        generation=driver.generation,
        size_bytes=await anyio.to_thread.run_sync(lambda: snapshot.size_bytes),
        sealed=sealed is not None,
        token=episode.spec.owner.share_key,
        progress=episode.records.progress.facts.noted(),
        tools=offered.to_json(),
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """What is saved. `sealed`: see `states.SEALED_FILE`."""

    sandbox: SavedSandbox
    driver: DriverClient
    sealed: Path | None
    tasks: TaskGroup


class EpisodeSnapshots:
    """Saves the states of one episode, when asked, and after every so many calls of its specification."""

    def __init__(self, episode: Episode, states: SavedStates) -> None:
        self._episode = episode
        self._states = states
        self._pauses = episode.calls.gate = CallPauses(episode.calls)
        self._lock = anyio.Lock()
        self._source: _Source | None = None
        self._every = BranchOptions.of(episode.spec).snapshots
        self._answered = 0
        self._due: int | None = None
        """The call after which a state is to be saved now; calls are paused until then."""

    @asynccontextmanager
    async def saving(
        self, sandbox: Sandbox, driver: DriverClient, sealed: Path | None
    ) -> AsyncGenerator[None]:
        """In the body, the states of this sandbox can be saved."""
        episode = self._episode
        if why_not_saved(episode.sandbox_factory, self._states, episode.spec.task) is not None:
            yield
            return
        try:
            async with background_tasks() as tasks:
                self._source = _Source(cast("SavedSandbox", sandbox), driver, sealed, tasks)
                if self._every is not None:
                    self._answered = episode.trajectory.index.answered
                    self._pauses.on_still = self._save_if_due
                yield
        finally:
            self._source = self._pauses.on_still = None
            self._release()

    async def take(self) -> SavedState:
        """Save the state after the newest call, unless it is there.

        Calls that run may end before, and further ones wait. Raises BadRequestError if the attempt is not
        open, NotRunnableError if its states are not saved here, and SnapshotError, LimitExceededError or
        SandboxLostError if that fails.
        """
        episode = self._episode
        if reason := why_not_saved(episode.sandbox_factory, self._states, episode.spec.task):
            raise NotRunnableError(f"the state of this episode cannot be saved: {reason}", missing=[reason])
        await episode.ready()
        async with self._lock, self._pauses.hold(STILL_SECONDS) as at:
            if at is None:
                raise SnapshotError(
                    f"a call has run for more than {STILL_SECONDS:.0f} s: a state is saved while none runs"
                )
            return await self._save(at)

    async def settled(self) -> None:
        """Wait for a state that is being saved, so that a branch finds it."""
        while self._due is not None:
            await anyio.lowlevel.checkpoint()
            async with self._lock:
                pass

    def _save_if_due(self) -> None:
        """No call runs any more. Calls that come from now on wait."""
        answered, every = self._episode.trajectory.index.answered, self._every
        if self._source is None or every is None or answered < self._answered + every:
            return
        self._answered, self._due = answered, self._pauses.begin()
        self._source.tasks.start_soon(self._save_due, self._due)

    def _release(self) -> None:
        if self._due is not None:
            self._due = None
            self._pauses.end()

    async def _save_due(self, at: int) -> None:
        try:
            async with self._lock:
                await self._save(at)
        except DecathlonError as error:
            _log.warning(
                "the state of an episode could not be saved",
                extra=fields(episode=self._episode.public_id, at=at, why=error.message),
            )
        finally:
            self._release()

    async def _save(self, at: int) -> SavedState:
        episode, source = self._episode, self._source
        if source is None or episode.state.phase is not Phase.READY:
            raise BadRequestError("the attempt is not open: its state cannot be saved")
        try:
            folder = await anyio.to_thread.run_sync(self._states.prepare, episode.files.folder, at)
            if (known := await anyio.to_thread.run_sync(SavedState.read, folder)) is not None:
                return known
            async with self._states.room(source.sandbox.max_snapshot_bytes):
                state = await save_state(episode, folder, at, source.sandbox, source.driver, source.sealed)
            if episode.state.phase is not Phase.READY:
                # What runs in the sandbox may have been killed before it was saved.
                await anyio.to_thread.run_sync(shutil.rmtree, folder)
                raise BadRequestError("the attempt was closed while its state was saved")
            await anyio.to_thread.run_sync(self._states.add, state, source.sealed)
        except OSError as error:
            raise SnapshotError(f"the state cannot be kept: {error.strerror}") from None
        return state
