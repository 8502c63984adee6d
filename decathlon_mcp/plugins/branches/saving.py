"""Saves the states of an episode, its sandbox after a call, and opens copies, from which branches go on.

A state is saved while no call runs, so that it belongs to a call, and after every message to the driver has
arrived. A copy's driver is attached to under a higher generation, as by another server process: tunnels end,
replies to the original's requests are ignored, and the time begins for which it survives without a server.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup
from decathlon_sandbox import wire

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver.client import DriverClient, connect
from decathlon_mcp.driver.stream import COPIES_OF_COPIES
from decathlon_mcp.episodes.beginnings import AgentSandbox, Start
from decathlon_mcp.episodes.call import Call
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.extensions import Opened
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import (
    BadRequestError,
    CallTimeoutError,
    DecathlonError,
    NotRunnableError,
    SandboxLostError,
    SnapshotError,
)
from decathlon_mcp.events import SandboxTaken
from decathlon_mcp.plugins.branches.states import SavedState, SavedStates, discard
from decathlon_mcp.plugins.regrade.kept_attempts import keep_sealed, read_original
from decathlon_mcp.sandboxes.base import Sandbox, SandboxSpec
from decathlon_mcp.sandboxes.capabilities import SavedSandbox, Snapshot, snapshots_of
from decathlon_mcp.sandboxes.plugins import saving_options
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.telemetry.logs import fields

STILL_SECONDS = 60.0
"""How long calls that run may take to end before a state is saved; later calls wait for that."""
_log = logging.getLogger("decathlon.episodes")
COPY_SECONDS = 20.0
"""How long the driver of a copy may take to answer, which it mostly does at once: it runs already."""


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
    episode: Episode,
    folder: Path,
    at: int,
    sandbox: SavedSandbox,
    driver: DriverClient,
    task_folder_archive: Path | None,
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
        generation=driver.reconnect.generation,
        size_bytes=await anyio.to_thread.run_sync(lambda: snapshot.size_bytes),
        sealed=task_folder_archive is not None,
        token=episode.spec.owner.share_key,
        progress=episode.records.progress.facts.noted(),
        tools=offered.to_json(),
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """What is saved. `task_folder_archive`: see `states.SEALED_FILE`."""

    sandbox: SavedSandbox
    driver: DriverClient
    task_folder_archive: Path | None
    tasks: TaskGroup


class EpisodeSnapshots:
    """Saves the states of one episode, when asked, and after `every` so many calls.

    It is the gate of the episode's calls: while a state is saved, new calls wait, and calls that were
    accepted before may end.
    """

    def __init__(self, episode: Episode, states: SavedStates, every: int | None) -> None:
        self._episode = episode
        self._states = states
        self._lock = anyio.Lock()
        self._source: _Source | None = None
        self._every = every
        self._answered = 0
        self._due: int | None = None
        """The call after which a state is to be saved now; calls are held back until then."""
        self._holders = self._last = 0
        """How many hold calls back now, and the number of the last call that may run meanwhile."""
        self._over = anyio.Event()
        self._ended = anyio.Event()

    def holds(self, call: Call) -> bool:
        """Whether the call has to wait now."""
        return self._holders > 0 and call.seq > self._last

    async def passed(self, call: Call) -> None:
        """Wait until the call may run."""
        while self.holds(call):
            await self._over.wait()

    def call_ended(self) -> None:
        """A call has ended."""
        self._ended.set()
        if self._source is not None and not self._holders and self._is_still:
            self._save_if_due(self._source)

    @property
    def _is_still(self) -> bool:
        return all(map(self.holds, self._episode.calls.unanswered))

    def _hold(self) -> int:
        """Let calls that come now wait until `_release`; returns the number of the last one before."""
        if self._holders == 0:
            self._last, self._over = self._episode.calls.last, anyio.Event()
        self._holders += 1
        return self._last

    def _release(self) -> None:
        """Let calls run again, if nobody else holds them."""
        self._holders -= 1
        if self._holders == 0:
            self._over.set()

    @asynccontextmanager
    async def saving(
        self, sandbox: Sandbox, driver: DriverClient, task_folder_archive: Path | None
    ) -> AsyncGenerator[None]:
        """In the body, the states of this sandbox can be saved."""
        episode = self._episode
        if why_not_saved(episode.sandbox_factory, self._states, episode.spec.task) is not None:
            yield
            return
        episode.calls.gate = self
        try:
            async with background_tasks() as tasks:
                self._source = _Source(cast("SavedSandbox", sandbox), driver, task_folder_archive, tasks)
                self._answered = episode.trajectory.index.answered
                yield
        finally:
            self._source = None
            self._end_due()

    async def take(self) -> SavedState:
        """Save the state after the newest call, unless it is there.

        Calls that run may end before, and further calls wait. Raises BadRequestError if the attempt is not
        open, NotRunnableError if its states are not saved here, and SnapshotError, LimitExceededError or
        SandboxLostError if that fails.
        """
        episode = self._episode
        if reason := why_not_saved(episode.sandbox_factory, self._states, episode.spec.task):
            raise NotRunnableError(f"the state of this episode cannot be saved: {reason}", missing=[reason])
        await episode.ready()
        async with self._lock:
            at = self._hold()
            try:
                with anyio.move_on_after(STILL_SECONDS):
                    while not self._is_still:
                        self._ended = anyio.Event()
                        await self._ended.wait()
                if not self._is_still:
                    raise SnapshotError(
                        f"a call has run for more than {STILL_SECONDS:.0f} s: a state is saved while none "
                        "runs"
                    )
                return await self._save(at)
            finally:
                self._release()

    async def settled(self) -> None:
        """Wait for a state that is being saved, so that a branch finds it."""
        while self._due is not None:
            await anyio.lowlevel.checkpoint()
            async with self._lock:
                pass

    def _save_if_due(self, source: _Source) -> None:
        """No call runs any more. Calls that come from now on wait."""
        answered, every = self._episode.trajectory.index.answered, self._every
        if every is None or answered < self._answered + every:
            return
        self._answered, self._due = answered, self._hold()
        source.tasks.start_soon(self._save_due, self._due)

    def _end_due(self) -> None:
        if self._due is not None:
            self._due = None
            self._release()

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
            self._end_due()

    async def _save(self, at: int) -> SavedState:
        episode, source = self._episode, self._source
        if source is None or episode.state.phase is not Phase.READY:
            raise BadRequestError("the attempt is not open: its state cannot be saved")
        try:
            folder = await anyio.to_thread.run_sync(self._states.prepare, episode.files.folder, at)
            if (known := await anyio.to_thread.run_sync(SavedState.read, folder)) is not None:
                return known
            async with self._states.room(source.sandbox.max_snapshot_bytes):
                state = await save_state(
                    episode, folder, at, source.sandbox, source.driver, source.task_folder_archive
                )
            if episode.state.phase is not Phase.READY:
                # What runs in the sandbox may have been killed before it was saved.
                await anyio.to_thread.run_sync(shutil.rmtree, folder)
                raise BadRequestError("the attempt was closed while its state was saved")
            await anyio.to_thread.run_sync(self._states.add, state, source.task_folder_archive)
        except OSError as error:
            raise SnapshotError(f"the state cannot be kept: {error.strerror}") from None
        return state


async def begin_as_copy(start: Start, state: SavedState, *, prepared: bool = False) -> AgentSandbox | None:
    """Open a copy of another episode's sandbox as the agent's, and offer its tools.

    None if that is not possible; then the state is discarded. `prepared`: see `Facts`.
    """
    episode = start.episode
    opener = partial(open_copy, episode.sandbox_factory, state, start.admission.opening)
    try:
        async with start.admission.set_ups, AsyncExitStack() as opened:
            sandbox, driver = await opened.enter_async_context(
                start.open_sandbox(start.agent_name, None, opener)
            )
            if state.sealed:
                await _copy_sealed(start, state)
            tools = await start.offer.copy(state.tools)
            # It is a branch, if at all, of another episode than the saved episode.
            facts = {name: fact for name, fact in state.progress.items() if name != "branch"}
            episode.records.note_facts(**{"prepared": prepared, **facts})
            await start.stack.enter_async_context(opened.pop_all())
    except (SnapshotError, SandboxLostError, CallTimeoutError, OSError, ValueError, KeyError) as error:
        why = error.message if isinstance(error, DecathlonError) else str(error)
        _log.warning(
            "a saved state cannot be used: the set-up and the calls after it are made again",
            extra=fields(episode=episode.public_id, at=state.at, why=why),
        )
        # Others would wait for it in vain.
        await anyio.to_thread.run_sync(discard, state)
        return None
    episode.emit(SandboxTaken("copied"))
    session = await start.offer.tool_session(sandbox, driver)
    return AgentSandbox(sandbox, driver, session, tools, sealed=state.sealed)


@asynccontextmanager
async def open_copy(
    factory: SandboxFactory, state: SavedState, opening: anyio.CapacityLimiter, spec: SandboxSpec
) -> AsyncGenerator[Opened]:
    """Open a sandbox from a saved state and attach to its driver; both are gone on exit.

    `opening`: limits how many the provider creates at once. Raises SnapshotError if it cannot be opened here.
    """
    provider = snapshots_of(factory.provider)
    if provider is None:
        raise SnapshotError(f"sandboxes here cannot be opened from a state: use {saving_options()}")
    if (state.provider, state.wire_version) != (provider.name, wire.VERSION):
        raise SnapshotError(
            f"the state is of provider {state.provider} and wire version {state.wire_version}, and this "
            f"server has provider {factory.provider.name} and wire version {wire.VERSION}"
        )
    # To the driver of the copy, this server is a later one than to the original's.
    generation = max(factory.reconnect.generation, state.generation + 1)
    if generation >= factory.reconnect.generation + COPIES_OF_COPIES:
        raise SnapshotError(f"there are no more than {COPIES_OF_COPIES} copies of copies of copies")
    reconnect = replace(factory.reconnect, generation=generation)
    async with AsyncExitStack() as stack:
        async with opening:
            copy = provider.open(spec, snapshot=Snapshot(state.folder))
            sandbox = await stack.enter_async_context(copy)
        attached = connect(sandbox, reconnect=reconnect, reattached=True)
        driver = await stack.enter_async_context(attached)
        # Before anything is sent to what runs in it: it is a sandbox of its own.
        with anyio.move_on_after(COPY_SECONDS) as time_limit:
            await driver.ping()
        if time_limit.cancelled_caught:
            raise SnapshotError(f"the driver of a copy has not answered within {COPY_SECONDS:g} s")
        yield sandbox, driver


async def _copy_sealed(start: Start, state: SavedState) -> None:
    """Copy the task's folder as preprocess left it. Raises OSError, ValueError."""
    await anyio.to_thread.run_sync(shutil.copyfile, state.task_folder_archive, start.task_folder_archive)
    # What is kept of the episode that was saved is kept of the copy.
    if (original := await anyio.to_thread.run_sync(read_original, state.owner)) is not None:
        await keep_sealed(start, original)
