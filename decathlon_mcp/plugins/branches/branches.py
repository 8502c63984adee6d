"""What saved states and branches hang on the episodes of a server."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread

from decathlon_mcp.episodes.beginnings import AgentSandbox, EpisodeHooks, Following, Start
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry, RegistryOptions
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.specification import EpisodeSpec
from decathlon_mcp.errors import NotRunnableError, SettingsError
from decathlon_mcp.plugins.branches.copies import begin_as_copy
from decathlon_mcp.plugins.branches.options import Branch, BranchOptions, note_branch
from decathlon_mcp.plugins.branches.prepared import PREPARED_FOLDER, PreparedTasks
from decathlon_mcp.plugins.branches.replay import check_source, play_again, refuse_shared
from decathlon_mcp.plugins.branches.saving import EpisodeSnapshots, why_not_saved
from decathlon_mcp.plugins.branches.settings import BranchSettings
from decathlon_mcp.plugins.branches.states import SavedState, SavedStates, nearest_state
from decathlon_mcp.sandboxes.plugins import saving_options
from decathlon_mcp.sandboxes.snapshots import snapshots_of
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.store import REPLAY_LABEL

MAX_READERS = 2
"""A trajectory of 256 MiB takes half a second of Python's lock. With more of them at once, others wait."""


class Branches(EpisodeHooks):
    """Saves the states of a server's episodes, and begins its branches."""

    def __init__(self, states: SavedStates, prepared: PreparedTasks) -> None:
        self._states = states
        self._prepared = prepared
        self._readers = anyio.CapacityLimiter(MAX_READERS)
        self._snapshots: WeakKeyDictionary[Episode, EpisodeSnapshots] = WeakKeyDictionary()

    def check(self, factory: SandboxFactory, spec: EpisodeSpec) -> None:
        """Refuse calls that are made again and reach what episodes share, and states that are not saved."""
        options = BranchOptions.of(spec)
        if (REPLAY_LABEL in spec.labels or Branch.of(spec) is not None) and not options.outside:
            refuse_shared(factory, spec.task, spec.task_name)
        if options.snapshots is not None and (reason := why_not_saved(factory, self._states, spec.task)):
            raise NotRunnableError(
                f"the states of {spec.task_name} cannot be saved: {reason}", missing=[reason]
            )

    async def begin(self, start: Start, following: Following) -> AgentSandbox:
        """A branch begins with the nearest state that was saved, and makes the calls after it again."""
        branch = Branch.of(start.episode.spec)
        if branch is None:
            return await self._prepared.begin(start, following)
        note_branch(start.episode)
        source, agent, copied = start.folder_of(branch.episode), None, 0
        if source is not None:
            state = await anyio.to_thread.run_sync(nearest_state, source, branch.at)
            if state is not None:
                agent = await begin_as_copy(start, state, exact=state.at == branch.at)
                copied = 0 if agent is None else state.at
        if agent is None:
            agent = await self._prepared.begin(start, following)
        await play_again(start.episode, branch, agent.open_session, source, copied=copied)
        return agent

    def acting(self, start: Start, agent: AgentSandbox) -> AbstractAsyncContextManager[object]:
        """States can be saved while the agent acts."""
        assert agent.driver is not None
        sealed = start.sealed_file if start.episode.records.progress.sealed else None
        return self.snapshots(start.episode).saving(agent.sandbox, agent.driver, sealed)

    def snapshots(self, episode: Episode) -> EpisodeSnapshots:
        """What saves the states of this episode."""
        found = self._snapshots.get(episode)
        if found is None:
            found = self._snapshots[episode] = EpisodeSnapshots(episode, self._states)
        return found

    async def save(self, episode: Episode) -> SavedState:
        """Save the state after the newest call, as `EpisodeSnapshots.take`."""
        return await self.snapshots(episode).take()

    async def settled(self, episode: Episode) -> None:
        """Wait for a state that is being saved, so that a branch finds it."""
        await self.snapshots(episode).settled()

    async def check_source(self, source: Path, at: int) -> None:
        """Check that an episode can be branched from after call `at`. Raises BadRequestError."""
        await check_source(source, at, self._readers)


def branches_of(registry: EpisodeRegistry) -> Branches:
    """What saves the states of a server's episodes."""
    return next(hooks for hooks in registry.options.hooks if isinstance(hooks, Branches))


def create(settings: Settings, options: RegistryOptions, factories: Mapping[str, SandboxFactory]) -> Branches:
    """What a server with these settings has. Raises SettingsError."""
    configured = settings.of(BranchSettings)
    if configured.prepared and configured.snapshot_mib == 0:
        raise SettingsError(
            "--prepared saves states of sandboxes, for which --snapshot-mib 0 leaves no space"
        )
    for factory in factories.values():
        if configured.prepared and snapshots_of(factory.provider) is None:
            raise SettingsError(
                f"--prepared: sandboxes of the provider {factory.provider.name} cannot be saved; "
                f"use {saving_options()}"
            )
    states = SavedStates(
        options.journals,
        max_bytes=configured.snapshot_mib << 20,
        kept=configured.snapshots_kept,
        disk=options.disk,
    )
    prepared = PreparedTasks(options.scratch / PREPARED_FOLDER, states, are_saved=configured.prepared)
    return Branches(states, prepared)
