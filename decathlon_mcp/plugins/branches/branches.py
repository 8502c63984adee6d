"""Branches: episodes that start where another episode stood after a call; and requests for saved states."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field, model_validator

from decathlon_mcp.catalogue.draws import TaskFilter
from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.beginnings import AgentSandbox, EpisodeHooks, Following, Start
from decathlon_mcp.episodes.call import Outcome
from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry, RegistryOptions
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.specification import EpisodeSpec, Principal
from decathlon_mcp.episodes.tools.tool_session import ToolSession
from decathlon_mcp.errors import (
    BadRequestError,
    DecathlonError,
    EpisodeClaimedError,
    NotRunnableError,
    SandboxLostError,
    SettingsError,
    SetUpError,
    UnknownToolError,
    failure_text,
)
from decathlon_mcp.grading.attempt import MAX_COUNT
from decathlon_mcp.labels import check_labels
from decathlon_mcp.plugins.branches.prepared import PREPARED_FOLDER, PreparedTasks
from decathlon_mcp.plugins.branches.saving import EpisodeSnapshots, begin_as_copy, why_not_saved
from decathlon_mcp.plugins.branches.states import SavedStates, nearest_state
from decathlon_mcp.plugins.history.columns import REPLAY_LABEL
from decathlon_mcp.plugins.history.repeated_calls import (
    Difference,
    Paths,
    RecordedCall,
    ReplyText,
    compare_replies,
    raw_members,
    recorded_calls,
    why_missing,
)
from decathlon_mcp.plugins.settings import BranchSettings
from decathlon_mcp.protocol.lobby_tools import EvaluatorTool, Labels, StartEpisode, require_evaluator
from decathlon_mcp.sandboxes.capabilities import snapshots_of
from decathlon_mcp.sandboxes.plugins import saving_options
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.trajectory import RequestKeys, Trajectory
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject

NAME = "branches"
"""Member of `EpisodeSpec.plugins`."""
MAX_READERS = 2
"""A trajectory of 256 MiB takes half a second of Python's lock. With more of them at once, others wait."""


OnDifference: TypeAlias = Literal["refuse", "report"]


class BranchOptions(BaseModel):
    """What a client asks of one episode, in `EpisodeSpec.plugins`."""

    model_config = ConfigDict(frozen=True)

    on_difference: OnDifference = "refuse"
    """What a reply does that differs from the other episode's: `refuse` ends the branch as an episode whose
    set-up failed, `report` counts the reply."""
    outside: bool = False
    """Whether calls may be made again that reach what episodes share."""
    snapshots: int | None = None
    """The state is saved after every so many calls; None: only when asked."""

    @classmethod
    def of(cls, spec: EpisodeSpec) -> Self:
        """The options of an episode."""
        return cls.model_validate(spec.plugins.get(NAME, {}))


@dataclass(frozen=True, slots=True)
class Branch:
    """Where an episode branches from another: the new episode starts as the other stood after call `at`.

    `episode`: public id of the other episode. Calls 1 to `at` are copied from the other, with their numbers.
    """

    episode: str
    at: int

    @classmethod
    def of(cls, spec: EpisodeSpec) -> Self | None:
        """None for an episode that is played whole."""
        member = spec.reported.get("branch")
        return None if member is None else cls(member["episode"], member["at"])

    @property
    def reported(self) -> JsonObject:
        """The member `branch` of what the episode reports."""
        return {"branch": {"episode": self.episode, "at": self.at, "differences": 0}}


def note_branch(episode: Episode, **members: Any) -> JsonObject:
    """Note more members of what a branch reports, and return all."""
    member = {**episode.reported["branch"], **members}
    episode.records.note_facts(branch=member)
    return member


class Branches(EpisodeHooks):
    """Saves the states of a server's episodes, and begins its branches."""

    def __init__(self, states: SavedStates, prepared: PreparedTasks | None) -> None:
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
            return await self._set_up(start, following)
        note_branch(start.episode)
        source, agent, copied = start.folder_of(branch.episode), None, 0
        if source is not None:
            state = await anyio.to_thread.run_sync(nearest_state, source, branch.at)
            if state is not None:
                agent = await begin_as_copy(start, state)
                copied = 0 if agent is None else state.at
                if copied == branch.at and agent is not None:
                    note_branch(start.episode, exact=True)
        if agent is None:
            agent = await self._set_up(start, following)
        await play_again(start.episode, branch, agent.open_session, source, copied=copied)
        return agent

    async def _set_up(self, start: Start, following: Following) -> AgentSandbox:
        return await (following() if self._prepared is None else self._prepared.begin(start, following))

    def acting(self, start: Start, agent: AgentSandbox) -> AbstractAsyncContextManager[object]:
        """States can be saved while the agent acts."""
        episode = start.episode
        # Most providers save nothing, and then an episode pays nothing for it.
        if snapshots_of(episode.sandbox_factory.provider) is None:
            return nullcontext()
        assert agent.driver is not None
        task_folder_archive = start.task_folder_archive if episode.records.progress.sealed else None
        return self.snapshots(episode).saving(agent.sandbox, agent.driver, task_folder_archive)

    def snapshots(self, episode: Episode) -> EpisodeSnapshots:
        """What saves the states of this episode."""
        found = self._snapshots.get(episode)
        if found is None:
            every = BranchOptions.of(episode.spec).snapshots
            found = self._snapshots[episode] = EpisodeSnapshots(episode, self._states, every)
        return found

    async def check_source(self, source: Path, at: int) -> None:
        """Check that an episode can be branched from after call `at`. Raises BadRequestError.

        `source`: its folder. How many trajectories are read at once is limited: the branch has no place in
        the queue yet.
        """

        def check() -> None:
            try:
                require_state_after(Trajectory(source).update(), at)
            except OSError as error:
                raise BadRequestError(f"the calls of this episode cannot be read: {error.strerror}") from None

        await anyio.to_thread.run_sync(check, limiter=self._readers)


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
    prepared = PreparedTasks(options.scratch / PREPARED_FOLDER, states) if configured.prepared else None
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
        options = BranchOptions.model_validate(self, from_attributes=True).model_dump(exclude_defaults=True)
        return {**super().asked_of_plugins(), **({NAME: options} if options else {})}

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
        await branches.snapshots(source).settled()
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
        state = await branches_of(registry).snapshots(episode).take()
        return {"at": state.at, "bytes": state.size_bytes}


_OF_ONE_EPISODE = frozenset({"event", "time", "replayed", "request", *RequestKeys.__struct_fields__})
"""Members of a call's lines that its copy in another episode does not have, such as the requests by which
clients know it."""
TIMES_SLOWER = 3
"""The calls may take so many times as long as the first time, in addition to the time limit of a set-up."""


def shared_with_others(factory: SandboxFactory, task: Task) -> list[str]:
    """What a task reaches that episodes share, because no set-up makes it for one of them.

    The network, unless its recording answers; services of which there is one for all; accounts, and
    whatever else tasks must not use at the same time.
    """
    web = factory.web
    is_outbound = factory.network_for(task) == "outbound" or (
        web is not None and web.reaches_sites and factory.uses_web(task)
    )
    services = factory.suite.services(task)
    return [
        *(["the network"] if is_outbound else []),
        *(f"the service {name}" for name, service in services.items() if service.image is None),
        *(resource.name for resource in factory.suite.shared_resources(task.id)),
    ]


def refuse_shared(factory: SandboxFactory, task: Task, task_name: str) -> None:
    """Raise BadRequestError for a task whose calls must not be made again without asking."""
    if shared := shared_with_others(factory, task):
        raise BadRequestError(
            f"the calls of {task_name} reach {', '.join(shared)}, which episodes share: made again they can "
            "change what others see, and have other replies; `outside` set to true allows it"
        )


def require_state_after(trajectory: Trajectory, last: int) -> None:
    """Check that the episode stood still after this call, in a state to which its calls lead.

    Raises BadRequestError, OSError.
    """
    index = trajectory.index
    if last > index.last:
        raise BadRequestError(
            f"there is no call {last} to branch after: the episode has {index.last} until now"
        )
    refused, claim = f"no branch after call {last}: call", index.placed.get("claim", math.inf)
    sent = trajectory.sent_calls()
    following = min((call_at for seq, call_at, _ in sent.places() if seq > last), default=math.inf)
    for call in sent:
        if call.seq > last:
            return
        if (missing := why_missing(call.reply)) is not None:
            why = "was cancelled" if missing == "cancelled" else "has no reply that could be compared"
            raise BadRequestError(f"{refused} {call.seq} {why}; branch before it")
        if call.reply_at > claim:
            raise BadRequestError(f"{refused} {call.seq} ended after the claim")
        if call.reply_at > following:
            raise BadRequestError(
                f"{refused} {call.seq} still ran when a later one was sent; branch after a call at whose end "
                "no other ran"
            )


async def play_again(
    episode: Episode, branch: Branch, session: ToolSession, source: Path | None, *, copied: int = 0
) -> None:
    """Make the calls of the episode that this episode branches from, before this episode is ready.

    `source`: its folder. `copied`: the call after which its sandbox was copied; calls up to this number are
    not made, but written with their replies. Raises SetUpError for a reply that differs, if the branch
    refuses that, and for calls that cannot be made or take too long; SandboxLostError.
    """
    if source is None:
        raise _gone(branch)
    try:
        recorded = await anyio.to_thread.run_sync(Trajectory(source).update)
        pairs = (raw_members(call) for call in recorded.sent_calls() if call.reply)
        while (pair := await anyio.to_thread.run_sync(next, pairs, None)) is not None:
            if pair[0]["seq"] > copied:
                break
            _copy(episode, branch, *pair)
        calls = (call for call in recorded_calls(recorded, branch.at) if call.seq > copied)
        times = (seconds for seconds in recorded.index.seconds[: branch.at] if not math.isnan(seconds))
        seconds = episode.spec.limits.set_up_seconds + TIMES_SLOWER * sum(times)
        with anyio.move_on_after(seconds) as time_limit:
            while (call := await anyio.to_thread.run_sync(next, calls, None)) is not None:
                await _play_call(episode, branch, session, call)
    except OSError:
        raise _gone(branch) from None
    if time_limit.cancelled_caught:
        raise SetUpError(f"calls 1 to {branch.at} of {branch.episode} took longer than {seconds:.0f} s")


def _copy(episode: Episode, branch: Branch, *lines: JsonObject) -> None:
    """Write a call from both lines that it has in the other episode, of whose state this episode is a copy.

    Members of the lines may be `msgspec.Raw`, except for `seq`, `server`, `tool`, `failed` and `seconds`.
    Raises SetUpError if the trajectory has no room.
    """
    call, reply = ({key: line[key] for key in line if key not in _OF_ONE_EPISODE} for line in lines)
    add = episode.trajectory.add
    if not (add("call", **call, replayed=True, request=0) and add("reply", **reply)):
        raise SetUpError(
            f"call {call['seq']} of {branch.episode} does not fit: the log has reached its limit, or the "
            "server's disk is nearly full"
        )


async def _play_call(episode: Episode, branch: Branch, session: ToolSession, call: RecordedCall) -> None:
    paths = _paths(episode, branch)
    arguments = call.arguments if paths is None or call.arguments is None else paths.moved(call.arguments)
    try:
        outcome = await episode.calls.replay(
            session, call.seq, call.name, CallParams.of(arguments, call.meta)
        )
    except (UnknownToolError, EpisodeClaimedError) as error:
        raise SetUpError(
            f"call {call.seq} of {branch.episode} cannot be made again: {error.message}"
        ) from None
    if isinstance(outcome, SandboxLostError):
        raise outcome
    difference = await anyio.to_thread.run_sync(_compare, call, outcome, paths)
    if difference is None:
        return
    if BranchOptions.of(episode.spec).on_difference == "refuse":
        raise SetUpError(
            f"call {call.seq} ({call.name}) of {branch.episode} has another reply now: {difference}; with "
            '`on_difference` "report" the branch goes on',
            call=call.seq,
            difference=difference.to_json(),
        )
    episode.trajectory.add("difference", seq=call.seq, **difference.to_json())
    note_branch(episode, differences=note_branch(episode)["differences"] + 1)


def _compare(call: RecordedCall, outcome: Outcome, paths: Paths | None) -> Difference | None:
    if call.reply is None:
        return None  # `check_source` has refused it
    return compare_replies(call.reply, _text_of(outcome), paths)


def _text_of(outcome: Outcome) -> ReplyText:
    if isinstance(outcome, DecathlonError):
        return ReplyText.of_error(failure_text(outcome))
    if outcome.result is None:
        return ReplyText.of_error(str((outcome.error or {}).get("message")))
    return ReplyText.of_result(json.loads(outcome.result))


def _paths(episode: Episode, branch: Branch) -> Paths | None:
    # Without isolation each sandbox has a folder of its own, which arguments name.
    root = episode.sandbox_factory.agent_root
    return Paths.of(str(root(branch.episode)), str(root(episode.public_id)))


def _gone(branch: Branch) -> SetUpError:
    return SetUpError(f"the record of episode {branch.episode}, from which this one branches, is gone")
