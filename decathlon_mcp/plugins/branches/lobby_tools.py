"""What the lobby lets clients do with saved states and branches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from decathlon_mcp.catalogue.draws import Draw
from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import AccessDeniedError
from decathlon_mcp.grading.attempt import MAX_COUNT
from decathlon_mcp.labels import check_labels, merge_labels
from decathlon_mcp.plugins.branches.branches import branches_of
from decathlon_mcp.plugins.branches.options import Branch, BranchOptions, OnDifference
from decathlon_mcp.protocol.lobby_tools import EvaluatorTool, StartEpisode
from decathlon_mcp.types import JsonObject


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
        same = (*Draw.model_fields, "task", "launch_time", "max_calls", "policy")
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

    async def start(
        self,
        registry: EpisodeRegistry,
        principal: Principal,
        *,
        operation: str | None = None,
        labels: Mapping[str, str] | None = None,
        ends_with_response: bool = False,
    ) -> Episode:
        """Start the episode, or a branch of another one with its policy, limits and launch time.

        For a branch also raises UnknownEpisodeError, AccessDeniedError, and BadRequestError for a call that
        none can begin after. A label of the call stands in place of the other episode's of the same name.
        """
        if self.branch_of is None or self.at is None:
            return await super().start(
                registry,
                principal,
                operation=operation,
                labels=labels,
                ends_with_response=ends_with_response,
            )
        access = EpisodeAccess.by_handle(registry.find(self.branch_of, principal), principal)
        if not access.can_evaluate:
            raise AccessDeniedError(
                "this episode is its controller's: only a controller's token may branch it"
            )
        source, branches = access.episode, branches_of(registry)
        own_labels = merge_labels(labels or {}, self.labels)
        await branches.settled(source)
        if registry.task_started_by(operation, principal) is None:
            folder = registry.folder(source.id)
            await branches.check_source(folder, self.at)
        return registry.start(
            source.spec.task_name,
            principal,
            launch_time=source.spec.launch_time,
            policy=source.spec.policy,
            limits=source.spec.limits,
            operation=operation,
            ends_with_response=ends_with_response,
            labels=check_labels({**source.spec.labels, **own_labels}),
            calls_before=self.at,
            plugins=self.asked_of_plugins(),
            reported=Branch(source.public_id, self.at).reported,
        )


class SnapshotEpisode(EvaluatorTool):
    """Save an episode's state with all its processes, so that branches begin there at once. Returns the
    number `at` of the last call. Later calls wait meanwhile, some tenths of a second."""

    tool = "snapshot_episode"
    action = "save its state"

    async def run(self, registry: EpisodeRegistry, episode: Episode) -> JsonObject:
        """The call after which the state was saved, and the state's size."""
        state = await branches_of(registry).save(episode)
        return {"at": state.at, "bytes": state.size_bytes}
