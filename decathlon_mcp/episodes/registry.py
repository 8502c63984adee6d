"""The registry of a server's episodes: starts them, and finds them."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal, Self

import anyio
from anyio.abc import TaskGroup

from decathlon_mcp.background import background_tasks, run_alone
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.draws import TaskFilter, TaskSampler
from decathlon_mcp.episodes.admission import Admission, Ticket
from decathlon_mcp.episodes.beginnings import EpisodeHooks
from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.episodes.extensions import SandboxSource
from decathlon_mcp.episodes.records import read_episode
from decathlon_mcp.episodes.runner import EpisodeRunner
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.shutdown import Shutdown
from decathlon_mcp.episodes.specification import EpisodeLimits, EpisodeSpec, Principal
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import BadRequestError, NotRunnableError, UnknownEpisodeError
from decathlon_mcp.events import Events, Spans, Started
from decathlon_mcp.grading.rubric import load_rubric
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.settings import RewardPolicy
from decathlon_mcp.storage.disk import DiskSpace
from decathlon_mcp.storage.kept_tools import FOLDER as KEPT_TOOLS_FOLDER
from decathlon_mcp.storage.kept_tools import KeptTools
from decathlon_mcp.storage.store import ENDED, EpisodeRow, Store
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

log = logging.getLogger("decathlon.episodes")

MAX_ENDED_EPISODES = 2_000
"""Ended episodes whose state and verdict can still be requested; the oldest are dropped."""
MAX_ENDED_IN_MEMORY = 200
"""The same on a server with a store, from which dropped episodes are read. One takes 20 KB of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryOptions:
    """What applies to every episode of a server."""

    reward_policy: RewardPolicy
    """The policy of an episode that is started without one."""
    limits: EpisodeLimits
    """The defaults of the limits of an episode."""
    drain_seconds: float
    """How long a stopping server waits for gradings."""
    journals: Path
    """Folder in which each episode gets a folder named by its handle."""
    scratch: Path
    """Folder for the archives of running episodes."""
    disk: DiskSpace
    """The file system of `journals` and `scratch`."""
    hooks: Sequence[EpisodeHooks] = ()
    """The hooks that plug-ins add to every episode."""


class EpisodeIndex:
    """The episodes that clients can ask for: of this server and, once they have ended, of the store.

    `restore`: makes an ended episode of its row; None if that is not possible.
    """

    def __init__(self, store: Store | None, restore: Callable[[EpisodeRow], Episode | None]) -> None:
        self._store = store
        self._restore = restore
        self._episodes: dict[str, Episode] = {}
        self._others: dict[tuple[str, str], Episode] = {}
        """By their agent id, and by the operation that has started them."""

    def __iter__(self) -> Iterator[Episode]:
        """The episodes in memory, the oldest first."""
        return iter(tuple(self._episodes.values()))

    def add(self, episode: Episode) -> None:
        """Keep an episode in memory, and drop the oldest ended episodes over their limit."""
        ended = [other for other in self if other.state.phase is Phase.ENDED]
        limit = MAX_ENDED_EPISODES if self._store is None else MAX_ENDED_IN_MEMORY
        while len(ended) > limit:
            # The token with the most ended episodes loses one, so that no token can displace the episodes of
            # another.
            ((token, _),) = Counter(other.spec.owner.token for other in ended).most_common(1)
            oldest = next(other for other in ended if other.spec.owner.token == token)
            ended.remove(oldest)
            del self._episodes[oldest.id]
            for key in _other_keys(oldest):
                self._others.pop(key, None)
        self._episodes[episode.id] = episode
        self._others |= dict.fromkeys(_other_keys(episode), episode)

    def find(self, by: Literal["id", "agent_id", "operation"], value: str) -> Episode | None:
        """The episode with this value in the column `by` of the store."""
        episode = self._episodes.get(value) if by == "id" else self._others.get((by, value))
        # Most requests have the handle of a live episode, for which the store need not be asked.
        if episode is not None or self._store is None or (by == "agent_id" and value in self._episodes):
            return episode
        row = self._store.find_one(EpisodeRow, **{by: value})
        if row is None or row.phase != ENDED or (episode := self._restore(row)) is None:
            return None
        self.add(episode)
        return episode

    def handle_of(self, public_id: str) -> str | None:
        """The handle of an episode of this state folder."""
        here = next((episode.id for episode in self if episode.public_id == public_id), None)
        rows = [] if here or self._store is None else self._store.find_episodes(public_id, 1)
        return rows[0].id if rows else here


def _other_keys(episode: Episode) -> list[tuple[str, str]]:
    operation = episode.spec.operation
    return [("agent_id", episode.spec.agent_id), *([] if operation is None else [("operation", operation)])]


class EpisodeRegistry:
    """The episodes of one server, which run inside `running`, and the ended episodes of its store.

    `factories`: sandbox factories by the names of the catalogue's suites. `source`: what has sandboxes ready
    for them. `store`: keeps what the next server needs to continue; None if all episodes end with this
    process. `archive`: without a store, gets the rows of ended episodes. `on_stop`: see `Shutdown`.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        draws: TaskSampler,
        factories: Mapping[str, SandboxFactory],
        *,
        admission: Admission,
        source: SandboxSource,
        signer: Signer,
        options: RegistryOptions,
        events: Events,
        spans: Spans | None = None,
        store: Store | None = None,
        archive: Store | None = None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.catalogue = catalogue
        self.draws = draws
        self.factories = factories
        self.admission = admission
        self.source = source
        self.signer = signer
        self.options = options
        self.events = events
        self.spans = spans
        self.store = store
        self._archive = archive
        self.recovering = False
        """Whether the episodes of a dead server are still being taken over."""
        self.shutdown = Shutdown(lambda: self.live, source, options.drain_seconds, on_stop)
        self.index = EpisodeIndex(store, self._restore)
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Self]:
        """Episodes can be started in the body; on exit all of them have ended."""
        async with self.source.running(), background_tasks() as self._tasks:
            try:
                yield self
            finally:
                with anyio.CancelScope(shield=True):
                    await self.shutdown.drain()

    @property
    def is_running(self) -> bool:
        """Whether `running` has been entered; before that no episode can be started."""
        return self._tasks is not None

    def why_unwritable(self) -> str | None:
        """Why the state folder cannot be written now, for people; None if it can."""
        if (reason := self.options.disk.why_unwritable()) is not None:
            return f"the state folder cannot be written: {reason}"
        reason = None if self.store is None else self.store.why_unwritable()
        return None if reason is None else f"the store cannot be written: {reason}"

    def folder(self, handle: str) -> Path:
        """The folder with the files of the episode with this handle."""
        return self.options.journals / handle

    def factory(self, suite: str) -> SandboxFactory:
        """The factory for the sandboxes of that suite; for a suite that is gone, a factory without tasks."""
        factory = self.factories.get(suite)
        if factory is None:
            # An episode of it that ended, or that a dead server had, is still asked for.
            other = next(iter(self.factories.values()))
            factory = replace(other, suite=replace(other.suite, name=suite, tasks={}), tool_lists=None)
        return factory

    # starting

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
        limits: EpisodeLimits | None = None,
        calls_before: int = 0,
        plugins: Mapping[str, JsonObject] | None = None,
        reported: JsonObject | None = None,
    ) -> Episode:
        """Start an episode without waiting; its sandbox opens in the background.

        `operation`: id of the request. A repeated request gets the episode of the first request.
        `ends_with_response`: the episode ends with the response to the request. `labels`: already checked.
        `limits`: in place of the server's and the task's. For the others see `EpisodeSpec`.

        Raises UnknownTaskError, NotRunnableError (naming what is missing), AtCapacityError, AccessDeniedError
        for a policy that reveals more than the server's, SuiteError for a broken task, rubric or prompt,
        BadRequestError for another launch time than the task's recording has, or for an operation id of
        another request, the error by which a hook refuses the episode, and OSError.
        """
        operation = _operation_key(operation, principal)
        if (episode := self._started_by(operation)) is not None:
            if episode.spec.task_name != task_id or not principal.may_use(episode.spec.owner):
                raise BadRequestError(
                    "another request has used this operation id to start an episode; use a new id for each"
                )
            return episode
        suite, task = self._runnable_task(task_id)
        spec = EpisodeSpec(
            id=secrets.token_hex(24),
            agent_id=secrets.token_hex(24),
            task=task,
            task_name=task_id,
            owner=principal,
            launch_time=self.catalogue.launch_time(suite, task, launch_time),
            policy=principal.choose_policy(policy, self.options.reward_policy),
            limits=limits or self.options.limits.for_task(task, max_calls),
            operation=operation,
            ends_with_response=ends_with_response,
            labels=labels or {},
            shares_launch_time=launch_time is not None,
            calls_before=calls_before,
            plugins=plugins or {},
            reported=reported or {},
        )
        for hooks in self.options.hooks:
            hooks.check(self.factory(suite.name), spec)
        self.options.disk.refuse_if_low()
        shared = suite.shared_resources(task.id)
        ticket = self.admission.reserve(task_id, shared, principal.share_key)
        try:
            episode = self.make(spec, suite.name, ticket)
            episode.create()
        except BaseException:
            self.admission.release(ticket)
            raise
        episode.emit(Started())
        log.info("episode started", extra=fields(episode=episode.public_id, task=task_id))
        self.run(episode)
        return episode

    def make(self, spec: EpisodeSpec, suite: str, ticket: Ticket) -> Episode:
        """An episode, which `run` keeps."""
        return Episode(
            spec,
            sandbox_factory=self.factory(suite),
            ticket=ticket,
            folder=self.folder(spec.id),
            disk=self.options.disk,
            emit=self.events.episode(suite, spec.task_name, spec.public_id),
            store=self.store,
            archive=self._archive,
        )

    def run(
        self,
        episode: Episode,
        first: Sequence[EpisodeHooks] = (),
        around: AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        """Keep an episode and run it in the background. `first`: hooks that precede the server's.

        `around`: see `EpisodeRunner`.
        """

        def folder_of(public_id: str) -> Path | None:
            handle = self.index.handle_of(public_id)
            return None if handle is None else self.folder(handle)

        self.index.add(episode)
        runner = EpisodeRunner(
            episode,
            admission=self.admission,
            signer=self.signer,
            scratch=self.options.scratch,
            kept_tools=KeptTools(self.options.journals.parent / KEPT_TOOLS_FOLDER),
            hooks=[*first, *self.options.hooks],
            folder_of=folder_of,
            around=around,
        )

        async def run() -> None:
            with anyio.CancelScope() as scope:
                self.shutdown.runners.add(scope)
                try:
                    await run_alone(runner.run)
                finally:
                    self.shutdown.runners.discard(scope)

        assert self._tasks is not None, "the registry is not running"
        self._tasks.start_soon(run)

    def draw(self, filters: TaskFilter, principal: Principal) -> str:
        """Draw a task for a new episode.

        Raises BadRequestError for filters that match nothing, AtCapacityError if no episode could start.
        """
        # Checked first, because a draw without a seed moves the order on.
        self._refuse_if_full(principal)
        (name,) = self.draws.take(filters, token=principal.token)
        return name

    def refuse_unless_startable(self, task_id: str, principal: Principal) -> None:
        """Raise what `start` would raise, without starting anything."""
        self._runnable_task(task_id)
        self._refuse_if_full(principal)

    def _runnable_task(self, task_id: str) -> tuple[Suite, Task]:
        self.shutdown.refuse_if_begun()
        suite, task = self.catalogue.find(task_id)
        if missing := self.catalogue.missing_sentences(suite, task):
            raise NotRunnableError(f"task {task_id} cannot run here: {'; '.join(missing)}", missing=missing)
        load_rubric(suite, task)
        return suite, task

    def _refuse_if_full(self, principal: Principal) -> None:
        self.shutdown.refuse_if_begun()
        self.options.disk.refuse_if_low()
        self.admission.refuse_if_full(principal.share_key)

    # finding

    @property
    def live(self) -> list[Episode]:
        """The episodes that have not ended."""
        return [episode for episode in self.index if episode.state.phase is not Phase.ENDED]

    def owned_by(self, principal: Principal) -> list[Episode]:
        """The principal's own episodes, newest first."""
        return [episode for episode in self.index if principal.owns(episode.spec.owner)][::-1]

    def find(self, handle: str, principal: Principal) -> Episode:
        """The episode with this handle.

        Raises UnknownEpisodeError if there is none, and also if the principal may not use it: a client cannot
        tell the two apart.
        """
        episode = self.index.find("id", handle)
        if episode is None or not principal.may_use(episode.spec.owner):
            raise UnknownEpisodeError(
                "there is no such episode here: it was never started, belongs to another client, or ended so "
                "long ago that it is forgotten; start a new one"
            )
        return episode

    def access(self, handle: str, principal: Principal) -> EpisodeAccess:
        """Access by a handle or an agent id. Raises UnknownEpisodeError, as `find` does."""
        return self.agent_access(handle) or EpisodeAccess.by_handle(self.find(handle, principal), principal)

    def agent_access(self, agent_id: str) -> EpisodeAccess | None:
        """Access by an agent id, for anyone who knows it; None if it is not an agent id."""
        episode = self.index.find("agent_id", agent_id)
        return None if episode is None else EpisodeAccess.by_agent_id(episode)

    def task_started_by(self, operation: str | None, principal: Principal) -> str | None:
        """The task of which an earlier request with this operation id has started an episode."""
        episode = self._started_by(_operation_key(operation, principal))
        return None if episode is None else episode.spec.task_name

    def _started_by(self, operation: str | None) -> Episode | None:
        return None if operation is None else self.index.find("operation", operation)

    def _restore(self, row: EpisodeRow) -> Episode | None:
        """An ended episode, as far as the store has it; None if its files were deleted."""
        try:
            stored = read_episode(row, (), self.catalogue)
        except ValueError:
            return None
        episode = self.make(stored.spec, stored.suite, Ticket(self.admission, stored.spec.task_name))
        episode.restore(stored)
        return episode


def _operation_key(operation: str | None, principal: Principal) -> str | None:
    """An operation id of one token: clients choose these ids, and two may choose the same."""
    return None if operation is None else f"{principal.token or ''}/{operation}"
