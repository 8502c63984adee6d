"""Every episode of this server: starting them, finding them, ending them all."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import get_args

import anyio
from anyio.abc import TaskGroup

from decathlon_mcp.background import background_tasks
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.draws import Draw, TaskSampler
from decathlon_mcp.episodes.access import Principal
from decathlon_mcp.episodes.admission import Admission, Ticket
from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.episodes.lease import Lease
from decathlon_mcp.episodes.runner import EpisodeRunner
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import AccessDeniedError, AtCapacityError, NotRunnableError, UnknownEpisodeError
from decathlon_mcp.grading.rubric import load_rubric
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.settings import RewardPolicy, Settings
from decathlon_mcp.storage.journal import Journal
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.episodes")

REMEMBERED = 2_000
"""Ended episodes that can still be asked how they ended and for their verdict; older ones are forgotten."""


class EpisodeRegistry:
    """Made by `open_episodes`."""

    def __init__(
        self,
        catalogue: Catalogue,
        stages: Mapping[str, SandboxFactory],
        settings: Settings,
        *,
        scratch: Path,
        tasks: TaskGroup,
    ) -> None:
        self.catalogue = catalogue
        self.draws = TaskSampler(catalogue)
        self.settings = settings
        self.signer = Signer.at(settings.state)
        self.admission = Admission(
            max_sandboxes=settings.max_sandboxes,
            max_opening=settings.max_opening,
            max_queue=settings.max_queue,
        )
        self._stages = stages
        self._scratch = scratch
        self._tasks = tasks
        self._episodes: dict[str, Episode] = {}
        self._by_agent: dict[str, Episode] = {}
        self.closing = False
        self.drained = anyio.Event()
        """Set once the server's own end has left no episode to be asked anything."""
        """Is the server ending? Then no episode starts."""
        self._drained_by: float | None = None

    def sandbox_factory(self, suite: str) -> SandboxFactory:
        """What that suite's episodes are played on."""
        return self._stages[suite]

    def start(
        self,
        task_id: str,
        principal: Principal,
        *,
        launch_time: datetime | None = None,
        policy: RewardPolicy | None = None,
        max_calls: int | None = None,
    ) -> Episode:
        """A new episode, at once; its sandbox opens behind it.

        Raises UnknownTaskError, NotRunnableError (naming what is missing), AtCapacityError, AccessDeniedError
        for a policy more open than the server's, and SuiteError for a task or a rubric that is broken.
        """
        suite, task = self._playable(task_id)
        policy = self._allowed(policy, principal)
        ticket = self.admission.reserve(task_id, suite.shared_resources(task.id))
        try:
            episode = self._born(suite, task, ticket, principal, launch_time, policy, max_calls)
        except BaseException:
            self.admission.give_back(ticket)
            raise
        self._forget_the_oldest()
        self._episodes[episode.id] = self._by_agent[episode.agent_id] = episode
        life = EpisodeRunner(
            episode,
            admission=self.admission,
            settings=self.settings,
            signer=self.signer,
            scratch=self._scratch,
        )
        self._tasks.start_soon(life.run)
        return episode

    def _born(
        self,
        suite: Suite,
        task: Task,
        ticket: Ticket,
        principal: Principal,
        launch_time: datetime | None,
        policy: RewardPolicy,
        max_calls: int | None,
    ) -> Episode:
        """An episode that nobody owns yet. Raises SuiteError where its prompt cannot be read, and OSError."""
        episode_id, agent_id = secrets.token_hex(24), secrets.token_hex(24)
        episode = Episode(
            episode_id=episode_id,
            agent_id=agent_id,
            task=task,
            task_name=ticket.task,
            owner=principal,
            ticket=ticket,
            sandbox_factory=self._stages[suite.name],
            journal=Journal(self.settings.state / "episodes" / episode_id),
            lease=Lease(
                idle_seconds=self.settings.idle_seconds, absolute_seconds=self.settings.episode_seconds
            ),
            launch_time=launch_time or datetime.now().astimezone(),
            policy=policy,
            max_calls=max_calls or self.settings.max_calls,
        )
        assert episode.prompt
        return episode

    def draw(self, wanted: Draw, principal: Principal) -> str:
        """Draw a task for a new episode. Nothing is drawn when no episode could start."""
        self._refuse_when_closing()
        self.admission.refuse_if_full()
        (name,) = self.draws.take(wanted, token=principal.token)
        return name

    def refuse_unless_startable(self, task_id: str) -> None:
        """Raise what `start` would, without starting anything."""
        self._playable(task_id)
        self.admission.refuse_if_full()

    def find(self, episode_id: str, principal: Principal) -> Episode:
        """Raises UnknownEpisodeError, whether there is no such episode or the caller may not use it."""
        episode = self._episodes.get(episode_id)
        if episode is None or not principal.may_use(episode.owner):
            raise UnknownEpisodeError(
                "there is no such episode here: it was never started, belongs to somebody else, or ended so "
                "long ago that it is forgotten; start a new one"
            )
        return episode

    def access(self, handle: str, principal: Principal) -> EpisodeAccess:
        """The place of who knows this handle, or an agent's id. Raises UnknownEpisodeError, as `find`."""
        return self.agent_access(handle) or EpisodeAccess.by_handle(self.find(handle, principal), principal)

    def agent_access(self, agent_id: str) -> EpisodeAccess | None:
        """The place that an agent's id gives, to whoever knows it; None where it is not one."""
        episode = self._by_agent.get(agent_id)
        return None if episode is None else EpisodeAccess.by_agent_id(episode)

    def owned_by(self, principal: Principal) -> list[Episode]:
        """The caller's own episodes, the newest first."""
        return [episode for episode in reversed(self._episodes.values()) if principal.owns(episode.owner)]

    @property
    def live(self) -> list[Episode]:
        """Those that have not ended."""
        return [episode for episode in self._episodes.values() if episode.state.phase is not Phase.ENDED]

    async def drain(self) -> None:
        """End every episode; those being graded are waited for, at most `drain_seconds`."""
        self.closing = True
        if self.live:
            log.info("draining", extra=fields(episodes=len(self.live)))
        for episode in self.live:
            episode.close(Ending.SERVER_STOPPED)
        self._drained_by = self._drained_by or anyio.current_time() + self.settings.drain_seconds
        with anyio.CancelScope(deadline=self._drained_by):
            for episode in self.live:
                await episode.state.reach(Phase.ENDED)
        self.drained.set()

    def _playable(self, task_id: str) -> tuple[Suite, Task]:
        self._refuse_when_closing()
        suite, task = self.catalogue.find(task_id)
        if missing := self.catalogue.missing_sentences(suite, task):
            raise NotRunnableError(f"task {task_id} cannot run here: {'; '.join(missing)}", missing=missing)
        load_rubric(suite, task)
        return suite, task

    def _refuse_when_closing(self) -> None:
        if self.closing:
            raise AtCapacityError("the server is shutting down: no new episodes", retryAfterSeconds=30.0)

    def _allowed(self, asked: RewardPolicy | None, principal: Principal) -> RewardPolicy:
        own, order = self.settings.reward, get_args(RewardPolicy)
        if asked is not None and not principal.controls and order.index(asked) < order.index(own):
            raise AccessDeniedError(
                f"this server's policy of the reward is {own!r}: only a controller's token may start an "
                f"episode with one more open, such as {asked!r}"
            )
        return asked or own

    def _forget_the_oldest(self) -> None:
        ended = [key for key, episode in self._episodes.items() if episode.state.phase is Phase.ENDED]
        for key in ended[: max(0, len(ended) - REMEMBERED)]:
            del self._by_agent[self._episodes.pop(key).agent_id]


@asynccontextmanager
async def running(
    catalogue: Catalogue, stages: Mapping[str, SandboxFactory], settings: Settings, scratch: Path
) -> AsyncGenerator[EpisodeRegistry]:
    """A registry whose episodes live no longer than this context. `scratch`: a folder for their archives."""
    async with background_tasks() as tasks:
        episodes = EpisodeRegistry(catalogue, stages, settings, scratch=scratch, tasks=tasks)
        try:
            yield episodes
        finally:
            with anyio.CancelScope(shield=True):
                await episodes.drain()
