"""What saved states and branches hang on the episodes of a server."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread
from pydantic import Field, model_validator

from decathlon_mcp.catalogue.draws import TaskFilter
from decathlon_mcp.episodes.beginnings import AgentSandbox, EpisodeHooks, Following, Start
from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry, RegistryOptions
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.specification import EpisodeSpec, Principal
from decathlon_mcp.errors import NotRunnableError, SettingsError
from decathlon_mcp.grading.attempt import MAX_COUNT
from decathlon_mcp.labels import check_labels
from decathlon_mcp.plugins.branches import Branch, BranchOptions, BranchSettings, OnDifference, note_branch
from decathlon_mcp.plugins.branches.prepared import PREPARED_FOLDER, PreparedTasks
from decathlon_mcp.plugins.branches.replay import check_source, play_again, refuse_shared
from decathlon_mcp.plugins.branches.saving import EpisodeSnapshots, begin_as_copy, why_not_saved
from decathlon_mcp.plugins.branches.states import SavedState, SavedStates, nearest_state
from decathlon_mcp.plugins.history.columns import REPLAY_LABEL
from decathlon_mcp.protocol.lobby_tools import EvaluatorTool, Labels, StartEpisode, require_evaluator
from decathlon_mcp.sandboxes.capabilities import snapshots_of
from decathlon_mcp.sandboxes.plugins import saving_options
from decathlon_mcp.settings import Settings
from decathlon_mcp.types import JsonObject

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
        task_folder_archive = start.task_folder_archive if start.episode.records.progress.sealed else None
        return self.snapshots(start.episode).saving(agent.sandbox, agent.driver, task_folder_archive)

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


class StartOrBranchEpisode(StartEpisode):
    __doc__ = StartEpisode.__doc__

    branch_of: str | None = Field(
        None,
        description="Handle of an episode, which may still play: the new one stands where that one stood "
        "after its call `at`. Its task, launch time, limits, policy and labels are the same.",
    )
    at: int | None = Field(
        None,
        ge=0,
        le=MAX_COUNT,
        description="With `branch_of`: calls 1 to `at` are made again before the episode is ready, except "
        "those before a state that was saved.",
    )
    on_difference: OnDifference = Field(
        "refuse",
        description="With `branch_of`, if one of these calls has another reply now: end the episode, or "
        "count it in the verdict.",
    )
    outside: bool = Field(
        False,
        description="Also replay or branch a task that reaches what episodes share: the network, services, "
        "accounts.",
    )
    snapshots: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Save the episode's state after every so many calls, where the server's sandboxes allow "
        "it: branches begin there. See also `snapshot_episode`.",
    )

    @model_validator(mode="after")
    def _branch_excludes_what_is_the_same(self) -> Self:
        if (self.branch_of is None) != (self.at is None):
            raise ValueError("`branch_of` and `at` belong together")
        same = (*TaskFilter.model_fields, "task", "launch_time", "max_calls", "policy")
        given = [f"`{name}`" for name in same if getattr(self, name) not in (None, ())]
        if self.branch_of is not None and given:
            raise ValueError(f"`branch_of` cannot be combined with {', '.join(given)}")
        return self

    def asked_of_plugins(self) -> dict[str, JsonObject]:
        """What is not the default of the options for branches."""
        options = BranchOptions(
            on_difference=self.on_difference, outside=self.outside, snapshots=self.snapshots
        )
        return {**super().asked_of_plugins(), **options.member()}

    async def options(
        self, registry: EpisodeRegistry, principal: Principal, labels: Labels, started: str | None
    ) -> dict[str, Any]:
        """What the call says about its episode, or a branch's task, policy, limits and launch time.

        For a branch also raises UnknownEpisodeError, AccessDeniedError, and BadRequestError for a call that
        none can begin after. A label of the call stands in place of the other episode's of the same name.
        """
        if self.branch_of is None or self.at is None:
            return await super().options(registry, principal, labels, started)
        access = EpisodeAccess.by_handle(registry.find(self.branch_of, principal), principal)
        require_evaluator(access, "branch it")
        source, branches = access.episode, branches_of(registry)
        await branches.settled(source)
        if started is None:
            await branches.check_source(registry.folder(source.id), self.at)
        return {
            "task_id": source.spec.task_name,
            "launch_time": source.spec.launch_time,
            "policy": source.spec.policy,
            "limits": source.spec.limits,
            "labels": check_labels({**source.spec.labels, **labels}),
            "calls_before": self.at,
            "reported": Branch(source.public_id, self.at).reported,
        }


class SnapshotEpisode(EvaluatorTool):
    """Save an episode's state with all its processes, so that branches begin there at once. Returns the
    number `at` of the last call. Later calls wait meanwhile, some tenths of a second."""

    tool = "snapshot_episode"
    action = "save its state"

    async def run(self, registry: EpisodeRegistry, episode: Episode) -> JsonObject:
        """The call after which the state was saved, and the state's size."""
        state = await branches_of(registry).save(episode)
        return {"at": state.at, "bytes": state.size_bytes}
