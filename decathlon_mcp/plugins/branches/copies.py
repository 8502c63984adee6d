"""Sandboxes that are copies: opened from the saved state of another one, with all its processes."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import anyio.to_thread
from decathlon_sandbox import wire

from decathlon_mcp.driver.client import connect
from decathlon_mcp.episodes.beginnings import AgentSandbox, Start
from decathlon_mcp.episodes.extensions import Opened
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import CallTimeoutError, DecathlonError, SandboxLostError, SnapshotError
from decathlon_mcp.plugins.branches.options import note_branch
from decathlon_mcp.plugins.branches.states import SavedState, discard
from decathlon_mcp.plugins.regrade.keeping import keep_sealed, read_original
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.plugins import saving_options
from decathlon_mcp.sandboxes.snapshots import Snapshot, snapshots_of
from decathlon_mcp.telemetry.logs import fields

COPY_SECONDS = 20.0
"""How long the driver of a copy may take to answer, which it mostly does at once: it runs already."""

log = logging.getLogger("decathlon.episodes")


async def begin_as_copy(
    start: Start, state: SavedState, *, exact: bool = False, prepared: bool = False
) -> AgentSandbox | None:
    """Open a copy of another episode's sandbox as the agent's, and offer its tools.

    None if that is not possible; then the state is discarded. `exact`: the state is that at which this
    episode, a branch, begins. `prepared`: see `Facts`.
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
            # It is a branch, if at all, of another episode than the one that was saved.
            facts = {name: fact for name, fact in state.progress.items() if name != "branch"}
            episode.records.note_facts(**{"prepared": prepared, **facts})
            if exact:
                note_branch(episode, exact=True)
            await start.stack.enter_async_context(opened.pop_all())
    except (SnapshotError, SandboxLostError, CallTimeoutError, OSError, ValueError, KeyError) as error:
        why = error.message if isinstance(error, DecathlonError) else str(error)
        log.warning(
            "a saved state cannot be used: the set-up and the calls after it are made again",
            extra=fields(episode=episode.public_id, at=state.at, why=why),
        )
        # Others would wait for it in vain.
        await anyio.to_thread.run_sync(discard, state)
        return None
    episode.metrics.copied()
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
    async with AsyncExitStack() as stack:
        async with opening:
            copy = provider.open(spec, snapshot=Snapshot(state.folder))
            sandbox = await stack.enter_async_context(copy)
        driver = await stack.enter_async_context(
            connect(
                sandbox,
                survival=factory.survival.of_copy(state.generation),
                taken_back=True,
            )
        )
        # Before anything is sent to what runs in it: it is a sandbox of its own.
        with anyio.move_on_after(COPY_SECONDS) as time_limit:
            await driver.ping()
        if time_limit.cancelled_caught:
            raise SnapshotError(f"the driver of a copy has not answered within {COPY_SECONDS:g} s")
        yield sandbox, driver


async def _copy_sealed(start: Start, state: SavedState) -> None:
    """Copy the task's folder as preprocess left it. Raises OSError, ValueError."""
    await anyio.to_thread.run_sync(shutil.copyfile, state.sealed_file, start.sealed_file)
    # What is kept of the episode that was saved is kept of the copy.
    if (original := await anyio.to_thread.run_sync(read_original, state.owner)) is not None:
        await keep_sealed(start, original)
