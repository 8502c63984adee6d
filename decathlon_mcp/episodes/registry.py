"""The registry of a server's episodes: starts them, finds them, and ends them all when the server stops."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Self

import anyio

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.draws import TaskFilter, TaskSampler
from decathlon_mcp.episodes.access import EpisodeAccess, choose_policy
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.directory import EpisodeDirectory, RegistryOptions
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.reattach import Reattachment
from decathlon_mcp.episodes.records import StoredEpisode
from decathlon_mcp.episodes.runner import EpisodeRunner, RunnerGroup
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.sandbox_sources import SandboxSources
from decathlon_mcp.episodes.specification import Branch, EpisodeLimits, EpisodeSpec, Principal
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import (
    AtCapacityError,
    BadRequestError,
    NotRunnableError,
    UnknownEpisodeError,
)
from decathlon_mcp.events import Events, Spans, Started
from decathlon_mcp.grading.rubric import load_rubric
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.settings import RewardPolicy
from decathlon_mcp.storage.kept_tools import FOLDER as KEPT_TOOLS_FOLDER
from decathlon_mcp.storage.kept_tools import KeptTools
from decathlon_mcp.storage.store import Store
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

log = logging.getLogger("decathlon.episodes")

HAND_OVER_SECONDS = 5.0
"""How long a server that hands over removes the sandboxes of its pool; the next one removes the others."""


class EpisodeRegistry:
    """All episodes of one server. They run inside `running`.

    `sources`: what the factories take sandboxes of. `factories`, `store`, `archive`: see `EpisodeDirectory`.
    `on_stop`: called when no episode can be started any more.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        draws: TaskSampler,
        factories: Mapping[str, SandboxFactory],
        *,
        admission: Admission,
        sources: SandboxSources,
        signer: Signer,
        options: RegistryOptions,
        events: Events,
        spans: Spans | None = None,
        store: Store | None = None,
        archive: Store | None = None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_stop = on_stop
        self.directory = EpisodeDirectory(
            catalogue,
            factories,
            options,
            admission=admission,
            events=events,
            store=store,
            archive=archive,
        )
        self.catalogue = catalogue
        self.draws = draws
        self.admission = admission
        self.sources = sources
        self.signer = signer
        self.options = options
        self.events = events
        self.spans = spans
        self.store = store
        self.recovering = False
        """Whether the episodes of a dead server are still being taken over."""
        self.closing = False
        """Whether the server is stopping; then no episode can be started."""
        self.handing_over = False
        """Whether this server ends and leaves its episodes and sessions to the next one."""
        self.drained = anyio.Event()
        """Set when a stopping server has no episode left to wait for."""
        self._runners = RunnerGroup()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Self]:
        """Episodes can be started in the body; on exit all of them have ended."""
        async with self.sources.running(), self._runners.running():
            try:
                yield self
            finally:
                with anyio.CancelScope(shield=True):
                    await self.drain()

    @property
    def is_running(self) -> bool:
        """Whether `running` has been entered; before that no episode can be started."""
        return self._runners.is_running

    @property
    def live(self) -> list[Episode]:
        """The episodes that have not ended."""
        return self.directory.live

    def why_unwritable(self) -> str | None:
        """Why the state folder cannot be written now, for people; None if it can."""
        if (reason := self.options.disk.why_unwritable()) is not None:
            return f"the state folder cannot be written: {reason}"
        reason = None if self.store is None else self.store.why_unwritable()
        return None if reason is None else f"the store cannot be written: {reason}"

    async def known_tools(self, task_id: str) -> list[JsonObject] | None:
        """What a task's episodes offer an agent, from the cache; None if it has no list of the task.

        Paths are as in the listed prompts; where prompts are provisional, an episode can have other paths.
        Raises UnknownTaskError, and SuiteError if the task has errors.
        """
        suite, task = self.catalogue.find(task_id)
        lists = self.directory.factory(suite.name).tool_lists
        key = None if lists is None else await lists.expected_key(task)
        if lists is None or key is None:
            return None
        known = await lists.find(key, suite.profile.root)
        return None if known is None else [*known.tools]

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
        branch: Branch | None = None,
        plugins: Mapping[str, JsonObject] | None = None,
    ) -> Episode:
        """Start an episode without waiting; its sandbox opens in the background.

        `operation`: id of the request. A repeated request gets the episode that the first one has started.
        `ends_with_response`: the episode ends with the response to the request. `labels`: checked ones.
        `limits`: in place of the server's and the task's. `branch`, `plugins`: see `EpisodeSpec`.

        Raises UnknownTaskError, NotRunnableError (naming what is missing), AtCapacityError, AccessDeniedError
        for a policy that reveals more than the server's, SuiteError for a broken task, rubric or prompt,
        BadRequestError for another launch time than the task's recording has, the error by which a hook
        refuses the episode, and OSError.
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
            policy=choose_policy(policy, self.options.reward_policy, principal),
            limits=limits or self.options.limits.for_task(task, max_calls),
            operation=operation,
            ends_with_response=ends_with_response,
            labels=labels or {},
            branch=branch,
            shares_launch_time=launch_time is not None,
            plugins=plugins or {},
        )
        return self._start(suite, spec)

    def _start(self, suite: Suite, spec: EpisodeSpec) -> Episode:
        for hooks in self.options.hooks:
            hooks.check(self.directory.factory(suite.name), spec)
        self.options.disk.refuse_if_low()
        shared, principal = suite.shared_resources(spec.task.id), spec.owner
        ticket = self.admission.reserve(spec.task_name, shared, principal.share_key)
        with ExitStack() as on_error:
            on_error.callback(self.admission.release, ticket)
            trajectory = self.directory.create_trajectory(spec.id, on_error)
            episode = self.directory.make(spec, suite.name, ticket, trajectory)
            # Read here, so that a task with a broken prompt fails at its start.
            _ = episode.prompt
            episode.history.write_head()
            episode.records.insert(spec, suite.name, episode.started_at)
            on_error.pop_all()
        episode.emit(Started())
        log.info("episode started", extra=fields(episode=episode.public_id, task=episode.spec.task_name))
        self._run(episode)
        return episode

    def recover(self, stored: StoredEpisode) -> None:
        """Continue an episode of a dead server in the background; one that cannot be continued ends there.

        `stored.sandboxes` must be exactly the sandboxes that the episode needs to continue.
        """
        shared = self.directory.factory(stored.suite).suite.shared_resources(stored.spec.task.id)
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
            trajectory = self.directory.reopen_trajectory(stored.spec.id)
        except OSError as error:
            obstacle = f"its trajectory cannot be continued: {error.strerror}"
            stored, trajectory = (
                replace(stored, obstacle=obstacle),
                self.directory.closed_trajectory(stored.spec.id),
            )
            log.exception(
                "an episode cannot be continued",
                extra=fields(episode=stored.spec.public_id, task=stored.spec.task_name, why=obstacle),
            )
        episode = self.directory.make(stored.spec, stored.suite, ticket, trajectory)
        episode.restore(stored)
        self._run(episode, Reattachment(episode, stored))

    def _run(self, episode: Episode, reattachment: Reattachment | None = None) -> None:
        def folder_of(public_id: str) -> Path | None:
            handle = self.directory.handle_of(public_id)
            return None if handle is None else self.directory.folder(handle)

        self.directory.add(episode)
        options = self.options
        runner = EpisodeRunner(
            episode,
            admission=self.admission,
            signer=self.signer,
            scratch=options.scratch,
            kept_tools=KeptTools(options.journals.parent / KEPT_TOOLS_FOLDER),
            hooks=options.hooks if reattachment is None else [reattachment, *options.hooks],
            folder_of=folder_of,
            around=None if reattachment is None else reattachment.recovering(),
        )
        self._runners.start(runner)

    def task_started_by(self, operation: str | None, principal: Principal) -> str | None:
        """The task of which an earlier request with this operation id has started an episode."""
        episode = self.directory.of_operation(_operation_key(operation, principal))
        return None if episode is None else episode.spec.task_name

    def draw(self, filters: TaskFilter, principal: Principal) -> str:
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

    def find(self, episode_id: str, principal: Principal) -> Episode:
        """The episode with this handle.

        Raises UnknownEpisodeError if there is none, and also if the principal may not use it: a client cannot
        tell the two apart.
        """
        episode = self.directory.find(episode_id)
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
        episode = self.directory.of_agent(agent_id)
        return None if episode is None else EpisodeAccess.by_agent_id(episode)

    async def drain(self) -> None:
        """End every episode; wait at most `drain_seconds`, or until `hurry`, for gradings in progress.

        A grading that takes longer ends without a score, so that waiting requests get an answer.
        """

        async def all_ended() -> None:
            for episode in self.live:
                await episode.state.reach(Phase.ENDED)

        self.closing = True
        self._on_stop()
        self.sources.close()
        if self.live:
            log.info("draining", extra=fields(episodes=len(self.live)))
        for episode in self.live:
            episode.close(Ending.SERVER_STOPPED)
        await self._runners.drain(all_ended, self.options.drain_seconds)
        self.drained.set()

    def hurry(self) -> None:
        """Let `drain` wait no longer for gradings."""
        self._runners.hurry()

    async def hand_over(self) -> None:
        """Start no further episode; leave running episodes to the next server on the state folder.

        Returns when every remaining sandbox belongs to an episode, after at most `HAND_OVER_SECONDS`.
        """
        self.closing = self.handing_over = True
        self._on_stop()
        with anyio.move_on_after(HAND_OVER_SECONDS):
            await self.sources.empty()

    def _started_by(self, operation: str | None, task_id: str, principal: Principal) -> Episode | None:
        """The episode that an earlier request with this operation id has started.

        Raises BadRequestError if the earlier request was different, or came from another principal.
        """
        episode = self.directory.of_operation(operation)
        if episode is None:
            return None
        if episode.spec.task_name != task_id or not principal.may_use(episode.spec.owner):
            raise BadRequestError(
                "another request has used this operation id to start an episode; use a new id for each"
            )
        return episode

    def _runnable_task(self, task_id: str) -> tuple[Suite, Task]:
        self._require_open()
        suite, task = self.catalogue.find(task_id)
        if missing := self.catalogue.missing_sentences(suite, task):
            raise NotRunnableError(f"task {task_id} cannot run here: {'; '.join(missing)}", missing=missing)
        load_rubric(suite, task)
        return suite, task

    def _refuse_if_full(self, principal: Principal) -> None:
        self.options.disk.refuse_if_low()
        self.admission.refuse_if_full(principal.share_key)

    def _require_open(self) -> None:
        if self.closing:
            raise AtCapacityError("the server is shutting down: no new episodes", retryAfterSeconds=30.0)


def _operation_key(operation: str | None, principal: Principal) -> str | None:
    """An operation id of one token: clients choose these ids, and two may choose the same."""
    return None if operation is None else f"{principal.token or ''}/{operation}"
