"""The registry of a server's episodes: starts them, finds them, and ends them all when the server stops."""

from __future__ import annotations

import logging
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Self

import anyio
from anyio.abc import TaskGroup

from decathlon_mcp.background import background_tasks, run_alone
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.draws import Draw, TaskSampler
from decathlon_mcp.episodes.access import EpisodeAccess, choose_policy
from decathlon_mcp.episodes.admission import Admission, Ticket
from decathlon_mcp.episodes.beginnings import Branching, EpisodeHooks
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.reattach import Reattachment
from decathlon_mcp.episodes.records import StoredEpisode, read_episode
from decathlon_mcp.episodes.runner import EpisodeRunner
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.sandbox_sources import SandboxSources
from decathlon_mcp.episodes.specification import (
    Branch,
    EpisodeLimits,
    EpisodeSpec,
    OnDifference,
    Principal,
)
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import (
    AtCapacityError,
    BadRequestError,
    NotRunnableError,
    UnknownEpisodeError,
)
from decathlon_mcp.grading.rubric import load_rubric
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.labels import check_labels
from decathlon_mcp.settings import RewardPolicy
from decathlon_mcp.storage.disk import RETRY_SECONDS, DiskSpace, is_full, open_regular
from decathlon_mcp.storage.kept_files import VERDICT_FILE, KeptFiles
from decathlon_mcp.storage.kept_tools import FOLDER as KEPT_TOOLS_FOLDER
from decathlon_mcp.storage.kept_tools import KeptTools
from decathlon_mcp.storage.store import ENDED, Store
from decathlon_mcp.storage.trajectory import Trajectory
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.telemetry.metrics import Metrics
from decathlon_mcp.telemetry.spans import Spans
from decathlon_mcp.types import JsonObject

log = logging.getLogger("decathlon.episodes")

MAX_ENDED_EPISODES = 2_000
"""Ended episodes whose state and verdict can still be requested; the oldest are dropped."""
MAX_ENDED_IN_MEMORY = 200
"""The same on a server with a store, which has those that are dropped. One takes 20 KB of memory."""
END_SECONDS = 15.0
"""How long a server that stops waits for the ends of episodes whose gradings it has cancelled."""
HAND_OVER_SECONDS = 5.0
"""How long a server that hands over removes the sandboxes of its pool; the next one removes the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryOptions:
    """What applies to every episode of a server.

    `journals`: folder in which each episode gets a folder named by its handle. `scratch`: folder for the
    archives of running episodes. `disk`: their file system. `max_log_bytes`: limit on the calls in one
    episode's trajectory. `drain_seconds`: how long a stopping server waits for gradings. `max_sessions`: how
    many MCP sessions each kind of address may have. `keeps_workspace`: whether what a later grading needs is
    kept in `journals`.
    """

    reward_policy: RewardPolicy
    limits: EpisodeLimits
    drain_seconds: float
    journals: Path
    scratch: Path
    disk: DiskSpace
    max_log_bytes: int
    max_sessions: int
    keeps_workspace: bool = False


class EpisodeRegistry:
    """All episodes of one server. They run inside `running`.

    `sandbox_factories` has one for each suite of the catalogue, by the suite's name. `store`: keeps what the
    next server needs to continue; None if everything is to end with this process. `archive`: gets the rows of
    ended episodes then. `sources`: those of which the factories take sandboxes. `hooks`: what hangs on every
    episode.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        draws: TaskSampler,
        sandbox_factories: Mapping[str, SandboxFactory],
        *,
        admission: Admission,
        sources: SandboxSources,
        signer: Signer,
        options: RegistryOptions,
        metrics: Metrics,
        spans: Spans | None = None,
        store: Store | None = None,
        archive: Store | None = None,
        hooks: Sequence[EpisodeHooks] = (),
    ) -> None:
        self.store = store
        self._archive = archive
        self._hooks = hooks
        self.handing_over = False
        """Whether this server ends and leaves its episodes and sessions to the next one."""
        self.catalogue = catalogue
        self.draws = draws
        self.admission = admission
        self.sources = sources
        self.signer = signer
        self.drained = anyio.Event()
        """Set when a stopping server has no episode left to wait for."""
        self._sandbox_factories = sandbox_factories
        self.options = options
        self.metrics = metrics
        self.spans = spans
        self.recovering = False
        """Whether the episodes of a dead server are still being taken over."""
        self._kept_tools = KeptTools(options.journals.parent / KEPT_TOOLS_FOLDER)
        self._episodes: dict[str, Episode] = {}
        self._by_agent_id: dict[str, Episode] = {}
        self._by_operation: dict[str, Episode] = {}
        self._tasks: TaskGroup | None = None
        self._closing = False
        self._drain_deadline: float | None = None
        self._drain_scope: anyio.CancelScope | None = None
        self._runner_scopes: set[anyio.CancelScope] = set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Self]:
        """Episodes can be started in the body; on exit all of them have ended."""
        async with self.sources.running(), background_tasks() as self._tasks:
            try:
                yield self
            finally:
                with anyio.CancelScope(shield=True):
                    await self.drain()

    @property
    def reward_policy(self) -> RewardPolicy:
        """The policy of an episode that is started without one."""
        return self.options.reward_policy

    @property
    def idle_seconds(self) -> float:
        """Time without a request after which an episode ends."""
        return self.options.limits.idle_seconds

    @property
    def is_running(self) -> bool:
        """Whether `running` has been entered; before that no episode can be started."""
        return self._tasks is not None

    @property
    def closing(self) -> bool:
        """Whether the server is stopping; then no episode can be started."""
        return self._closing

    @property
    def live(self) -> list[Episode]:
        """The episodes that have not ended."""
        return [episode for episode in self._episodes.values() if episode.state.phase is not Phase.ENDED]

    def sandbox_factory(self, suite: str) -> SandboxFactory:
        """The factory for the sandboxes of that suite; one without tasks for a suite that is gone."""
        factory = self._sandbox_factories.get(suite)
        if factory is None:
            # An episode of it that ended, or that a dead server had, is still asked for.
            other = next(iter(self._sandbox_factories.values()))
            factory = replace(other, suite=replace(other.suite, name=suite, tasks={}), tool_lists=None)
        return factory

    async def known_tools(self, task_id: str) -> list[JsonObject] | None:
        """What a task's episodes offer an agent, from the cache; None if it has no list of the task.

        Paths in them are as in the listed prompts: those of an episode can be others where prompts are
        provisional. Raises UnknownTaskError, and SuiteError if the task has errors.
        """
        suite, task = self.catalogue.find(task_id)
        lists = self.sandbox_factory(suite.name).tool_lists
        key = None if lists is None else await lists.expected_key(task)
        if lists is None or key is None:
            return None
        known = await lists.find(key, suite.profile.root)
        return None if known is None else [*known.router.tools]

    @property
    def is_available(self) -> bool:
        """False while the engine of a suite's sandboxes is gone."""
        return all(factory.provider.is_available for factory in self._sandbox_factories.values())

    def why_unwritable(self) -> str | None:
        """Why the state folder cannot be written now, for people; None if it can."""
        if (reason := self.options.disk.why_unwritable()) is not None:
            return f"the state folder cannot be written: {reason}"
        reason = None if self.store is None else self.store.why_unwritable()
        return None if reason is None else f"the store cannot be written: {reason}"

    def start(
        self,
        task_id: str,
        principal: Principal,
        *,
        launch_time: datetime | None = None,
        policy: RewardPolicy | None = None,
        max_calls: int | None = None,
        operation: str | None = None,
        ends_with_response: bool = False,
        labels: Mapping[str, str] | None = None,
        outside: bool = False,
        snapshots: int | None = None,
    ) -> Episode:
        """Start an episode without waiting; its sandbox opens in the background.

        `operation`: id of the request. A repeated request gets the episode that the first one has started.
        `ends_with_response`: the episode ends with the response to the request. `labels`: checked ones.
        `outside`: also a replay of a task that reaches what episodes share. `snapshots`: see `EpisodeSpec`.

        Raises UnknownTaskError, NotRunnableError (naming what is missing, also if its states cannot be
        saved), AtCapacityError, AccessDeniedError for a policy that reveals more than the server's,
        SuiteError for a broken task, rubric or prompt, BadRequestError for another launch time than that of
        the task's recording and for a replay that is refused, and OSError.
        """
        operation = _operation_key(operation, principal)
        if (episode := self._started_by(operation, task_id, principal)) is not None:
            return episode
        suite, task = self._runnable_task(task_id)
        spec = EpisodeSpec(
            id=secrets.token_hex(24),
            agent_id=secrets.token_hex(24),
            task=task,
            task_name=task_id,
            owner=principal,
            launch_time=self.catalogue.launch_time(suite, task, launch_time),
            policy=choose_policy(policy, self.reward_policy, principal),
            limits=self.options.limits.for_task(task, max_calls),
            keeps_workspace=self.options.keeps_workspace,
            operation=operation,
            ends_with_response=ends_with_response,
            labels=labels or {},
            snapshots=snapshots,
            shares_launch_time=launch_time is not None,
        )
        return self._start(suite, spec, outside=outside)

    def branch(
        self,
        source: Episode,
        at: int,
        principal: Principal,
        *,
        on_difference: OnDifference = "refuse",
        outside: bool = False,
        operation: str | None = None,
        ends_with_response: bool = False,
        labels: Mapping[str, str] | None = None,
        snapshots: int | None = None,
    ) -> Episode:
        """Start an episode that stands where another stood after call `at`; `check_source` allows it.

        Policy, limits and launch time are the other's. `labels`: in place of the other's of the same name.
        `outside`: also of a task that reaches what episodes share. Raises what `start` raises.
        """
        first = source.spec
        operation = _operation_key(operation, principal)
        if (episode := self._started_by(operation, first.task_name, principal)) is not None:
            return episode
        suite, task = self._runnable_task(first.task_name)
        spec = replace(
            first,
            id=secrets.token_hex(24),
            agent_id=secrets.token_hex(24),
            task=task,
            owner=principal,
            launch_time=self.catalogue.launch_time(suite, task, first.launch_time),
            policy=choose_policy(first.policy, self.reward_policy, principal),
            keeps_workspace=self.options.keeps_workspace,
            operation=operation,
            ends_with_response=ends_with_response,
            labels=check_labels({**first.labels, **(labels or {})}),
            branch=Branch(source.public_id, at, on_difference),
            snapshots=snapshots,
            shares_launch_time=True,
        )
        return self._start(suite, spec, outside=outside)

    def folder(self, handle: str) -> Path:
        """The folder with the files of the episode with this handle."""
        return self.options.journals / handle

    @property
    def branching(self) -> Branching:
        """What saves states, and begins branches. Raises NotRunnableError if nothing does."""
        for hooks in self._hooks:
            if isinstance(hooks, Branching):
                return hooks
        reason = "this server has no plug-in for branches and saved states"
        raise NotRunnableError(reason, missing=[reason])

    def _start(self, suite: Suite, spec: EpisodeSpec, *, outside: bool) -> Episode:
        if spec.branch is not None or spec.snapshots is not None:
            _ = self.branching
        for hooks in self._hooks:
            hooks.check(self.sandbox_factory(suite.name), spec, outside=outside)
        self.options.disk.refuse_if_low()
        shared, principal = suite.shared_resources(spec.task.id), spec.owner
        ticket = self.admission.reserve(spec.task_name, shared, principal.share_key)
        with ExitStack() as on_error:
            on_error.callback(self.admission.release, ticket)
            trajectory = self._create_files(spec.id, on_error)
            episode = self._episode(spec, suite.name, ticket, trajectory)
            # Read here, so that a task with a broken prompt fails at its start.
            _ = episode.prompt
            episode.write_head()
            episode.records.insert(spec, suite.name, episode.started_at)
            on_error.pop_all()
        self._drop_oldest_ended()
        episode.metrics.started()
        log.info("episode started", extra=fields(episode=episode.public_id, task=episode.task_name))
        self._run(episode)
        return episode

    def _episode(self, spec: EpisodeSpec, suite: str, ticket: Ticket, trajectory: Trajectory) -> Episode:
        key = (suite, spec.task_name)
        spans = self.spans
        return Episode(
            spec,
            sandbox_factory=self.sandbox_factory(suite),
            ticket=ticket,
            trajectory=trajectory,
            metrics=self.metrics.episode(*key)
            if spans is None
            else spans.episode(self.metrics, key, spec.public_id),
            store=self.store,
            archive=self._archive,
        )

    def recover(self, stored: StoredEpisode) -> None:
        """Continue an episode of a dead server in the background; one that cannot be continued ends there.

        Its sandboxes must be those that it needs to continue, and no others.
        """
        shared = self.sandbox_factory(stored.suite).suite.shared_resources(stored.spec.task.id)
        was_admitted = stored.phase is not Phase.QUEUED
        ticket = self.admission.restore(
            stored.spec.task_name,
            shared,
            stored.spec.owner.share_key,
            stored.progress.slots if was_admitted else None,
        )
        if stored.verdict is not None:
            self.admission.release(ticket)
        try:
            trajectory = self._reopen_files(stored.spec.id)
        except OSError as error:
            obstacle = f"its trajectory cannot be continued: {error.strerror}"
            stored, trajectory = replace(stored, obstacle=obstacle), self._closed_trajectory(stored.spec.id)
            log.exception(
                "an episode cannot be continued",
                extra=fields(episode=stored.spec.public_id, task=stored.spec.task_name, why=obstacle),
            )
        episode = self._episode(stored.spec, stored.suite, ticket, trajectory)
        episode.restore(stored)
        self._run(episode, Reattachment(episode, stored))

    def _folder_of(self, public_id: str) -> Path | None:
        """The folder of an episode of this state folder; None if there is none that is known."""
        handle = self.handle_of(public_id)
        return None if handle is None else self.folder(handle)

    def handle_of(self, public_id: str) -> str | None:
        """The handle of an episode of this state folder; None if there is none that is known."""
        for episode in self._episodes.values():
            if episode.public_id == public_id:
                return episode.id
        rows = [] if self.store is None else self.store.find_episodes(public_id, 1)
        return rows[0].id if rows else None

    def _reopen_files(self, episode_id: str) -> Trajectory:
        """Raises OSError."""
        options, folder = self.options, self.folder(episode_id)
        trajectory = Trajectory.reopen(folder, max_calls_bytes=options.max_log_bytes, disk=options.disk)
        KeptFiles(folder).reserve_again()
        return trajectory

    def _closed_trajectory(self, episode_id: str) -> Trajectory:
        """That of an episode that is over, whatever is in its folder. Opens nothing."""
        return Trajectory(self.folder(episode_id), disk=self.options.disk)

    def _run(self, episode: Episode, reattachment: Reattachment | None = None) -> None:
        assert self._tasks is not None, "the registry is not running"
        self._add(episode)
        runner = EpisodeRunner(
            episode,
            admission=self.admission,
            signer=self.signer,
            scratch=self.options.scratch,
            kept_tools=self._kept_tools,
            hooks=self._hooks if reattachment is None else [reattachment, *self._hooks],
            folder_of=self._folder_of,
            around=None if reattachment is None else reattachment.recovering(),
        )
        self._tasks.start_soon(self._run_in_scope, runner)

    async def _run_in_scope(self, runner: EpisodeRunner) -> None:
        with anyio.CancelScope() as scope:
            self._runner_scopes.add(scope)
            try:
                await run_alone(runner.run)
            finally:
                self._runner_scopes.discard(scope)

    def _add(self, episode: Episode) -> None:
        self._episodes[episode.id] = self._by_agent_id[episode.agent_id] = episode
        if episode.spec.operation is not None:
            self._by_operation[episode.spec.operation] = episode

    def written_verdict(self, episode_id: str) -> Verdict | None:
        """The verdict in an episode's folder."""
        try:
            with open_regular(self.options.journals / episode_id / VERDICT_FILE) as file:
                return Verdict.model_validate_json(file.read())
        except (OSError, ValueError):
            return None

    def task_started_by(self, operation: str | None, principal: Principal) -> str | None:
        """The task of which an earlier request with this operation id has started an episode."""
        episode = self._find_started_by(_operation_key(operation, principal))
        return None if episode is None else episode.task_name

    def draw(self, filters: Draw, principal: Principal) -> str:
        """Draw a task for a new episode.

        Raises BadRequestError for filters that match nothing, AtCapacityError if no episode could start.
        """
        # Checked first, because a draw without a seed moves the order on.
        self._require_open()
        self._refuse_if_full(principal)
        (name,) = self.draws.take(filters, token=principal.token)
        return name

    def refuse_unless_startable(self, task_id: str, principal: Principal) -> None:
        """Raise what `start` would raise, without starting anything."""
        self._runnable_task(task_id)
        self._refuse_if_full(principal)

    async def open_ahead(self) -> None:
        """Open sandboxes ahead of the kind that most tasks of each suite need first."""
        for factory in self._sandbox_factories.values():
            specs = Counter(factory.first_spec(task) for task in factory.suite.tasks.values())
            if not specs:
                continue
            ((spec, _),) = specs.most_common(1)
            await factory.expect(spec)

    def find(self, episode_id: str, principal: Principal) -> Episode:
        """The episode with this handle.

        Raises UnknownEpisodeError if there is none, and also if the principal may not use it: a client cannot
        tell the two apart.
        """
        episode = self._episodes.get(episode_id) or self._ended_before(episode_id)
        if episode is None or not principal.may_use(episode.spec.owner):
            raise UnknownEpisodeError(
                "there is no such episode here: it was never started, belongs to somebody else, or ended so "
                "long ago that it is forgotten; start a new one"
            )
        return episode

    def access(self, handle: str, principal: Principal) -> EpisodeAccess:
        """Access by a handle or an agent id. Raises UnknownEpisodeError, as `find` does."""
        return self.agent_access(handle) or EpisodeAccess.by_handle(self.find(handle, principal), principal)

    def agent_access(self, agent_id: str) -> EpisodeAccess | None:
        """Access by an agent id, for anyone who knows it; None if it is not an agent id."""
        episode = self._by_agent_id.get(agent_id)
        # Most requests have the handle of a live episode, for which the store need not be asked.
        if episode is None and agent_id not in self._episodes and self.store is not None:
            row = self.store.episode_of_agent(agent_id)
            episode = None if row is None else self._ended_before(row.id)
        return None if episode is None else EpisodeAccess.by_agent_id(episode)

    def owned_by(self, principal: Principal) -> list[Episode]:
        """The principal's own episodes, newest first."""
        return [
            episode for episode in reversed(self._episodes.values()) if principal.owns(episode.spec.owner)
        ]

    async def drain(self) -> None:
        """End every episode; wait at most `drain_seconds`, or until `hurry`, for those that are being graded.

        They have ended then too, without a score, so that requests which wait for them can be answered.
        """
        self._closing = True
        self.sources.close()
        if self.live:
            log.info("draining", extra=fields(episodes=len(self.live)))
        for episode in self.live:
            episode.close(Ending.SERVER_STOPPED)
        # A second call, at the end of `running`, must not extend the time.
        self._drain_deadline = self._drain_deadline or anyio.current_time() + self.options.drain_seconds
        with anyio.CancelScope(deadline=self._drain_deadline) as self._drain_scope:
            for episode in self.live:
                await episode.state.reach(Phase.ENDED)
        for scope in self._runner_scopes:
            scope.cancel()
        with anyio.move_on_after(END_SECONDS):
            for episode in self.live:
                await episode.state.reach(Phase.ENDED)
        self.drained.set()

    def hurry(self) -> None:
        """Let `drain` wait no longer for gradings."""
        self._drain_deadline = anyio.current_time()
        if self._drain_scope is not None:
            self._drain_scope.deadline = self._drain_deadline

    async def hand_over(self) -> None:
        """Start no episode any more; those that run are left to the next server on the state folder.

        Returns when no sandbox is left that no episode has, after at most `HAND_OVER_SECONDS`.
        """
        self._closing = self.handing_over = True
        with anyio.move_on_after(HAND_OVER_SECONDS):
            await self.sources.empty()

    def _started_by(self, operation: str | None, task_id: str, principal: Principal) -> Episode | None:
        """The episode that an earlier request with this operation id has started.

        Raises BadRequestError if that request was another one, or somebody else's.
        """
        episode = self._find_started_by(operation)
        if episode is None:
            return None
        if episode.task_name != task_id or not principal.may_use(episode.spec.owner):
            raise BadRequestError(
                "another request has used this operation id to start an episode; use a new id for each"
            )
        return episode

    def _find_started_by(self, operation: str | None) -> Episode | None:
        if operation is None:
            return None
        episode = self._by_operation.get(operation)
        if episode is None and self.store is not None and (row := self.store.episode_of_operation(operation)):
            episode = self._ended_before(row.id)
        return episode

    def _ended_before(self, episode_id: str) -> Episode | None:
        """An episode that ended on this state folder and is not in memory, as far as the store has it."""
        if self.store is None or (row := self.store.episode(episode_id)) is None or row.phase != ENDED:
            return None
        try:
            stored = read_episode(row, (), self.catalogue)
        except ValueError:
            return None  # its files were deleted
        ticket = Ticket(self.admission, stored.spec.task_name)
        episode = self._episode(stored.spec, stored.suite, ticket, self._closed_trajectory(row.id))
        episode.restore(stored)
        self._drop_oldest_ended()
        self._add(episode)
        return episode

    def _runnable_task(self, task_id: str) -> tuple[Suite, Task]:
        self._require_open()
        suite, task = self.catalogue.find(task_id)
        if missing := self.catalogue.missing_sentences(suite, task):
            raise NotRunnableError(f"task {task_id} cannot run here: {'; '.join(missing)}", missing=missing)
        load_rubric(suite, task)
        return suite, task

    def _create_files(self, episode_id: str, on_error: ExitStack) -> Trajectory:
        """The trajectory of a new episode and the room for its verdict, so that a full disk is found now."""
        options, folder = self.options, self.folder(episode_id)
        try:
            trajectory = Trajectory.create(folder, max_calls_bytes=options.max_log_bytes, disk=options.disk)
            on_error.callback(shutil.rmtree, folder, ignore_errors=True)
            on_error.callback(trajectory.close)
            KeptFiles(folder).reserve_verdict()
        except OSError as error:
            if not is_full(error):
                raise
            raise AtCapacityError(
                f"the state folder has no room for another episode: {error.strerror}",
                retryAfterSeconds=RETRY_SECONDS,
            ) from None
        return trajectory

    def _refuse_if_full(self, principal: Principal) -> None:
        self.options.disk.refuse_if_low()
        self.admission.refuse_if_full(principal.share_key)

    def _require_open(self) -> None:
        if self._closing:
            raise AtCapacityError("the server is shutting down: no new episodes", retryAfterSeconds=30.0)

    def _drop_oldest_ended(self) -> None:
        ended = [episode for episode in self._episodes.values() if episode.state.phase is Phase.ENDED]
        limit = MAX_ENDED_EPISODES if self.store is None else MAX_ENDED_IN_MEMORY
        while len(ended) > limit:
            # Of the token that has most of them, so that no token can have those of others dropped.
            ((token, _),) = Counter(episode.spec.owner.token for episode in ended).most_common(1)
            oldest = next(episode for episode in ended if episode.spec.owner.token == token)
            ended.remove(oldest)
            del self._episodes[oldest.id], self._by_agent_id[oldest.agent_id]
            self._by_operation.pop(oldest.spec.operation or "", None)


def _operation_key(operation: str | None, principal: Principal) -> str | None:
    """An operation id of one token: clients choose these ids, and two may choose the same."""
    return None if operation is None else f"{principal.token or ''}/{operation}"
