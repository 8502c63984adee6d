"""How an episode begins: a chain, whose last link sets the task up in a new sandbox.

A link begins the episode itself, or asks the link that follows it. So it can hold others back meanwhile, and
it knows when the set-up is done, before the episode is READY. The links of a server are its plug-ins'; an
episode of a dead server has one before them, which reattaches to its sandbox (`reattach`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from decathlon_mcp.catalogue.catalogue import SuiteRevision
from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.extensions import Opened, OpenNew
from decathlon_mcp.episodes.grading import require_whole_record
from decathlon_mcp.episodes.resources import EpisodeResources
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory, agent_sandbox
from decathlon_mcp.episodes.set_up import SEALED_FILE, PreparedTask, SetUp
from decathlon_mcp.episodes.specification import EpisodeSpec
from decathlon_mcp.episodes.tools.offer import ToolOffer
from decathlon_mcp.episodes.tools.session import ToolSession
from decathlon_mcp.grading.attempt import Attempt
from decathlon_mcp.grading.job import CapturedWorkspace
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.episodes")


@dataclass(frozen=True, slots=True)
class AgentSandbox:
    """An agent's sandbox that is set up, with the tools that it offers.

    `driver`: None if the sandbox was paused after the claim. `session`: calls the tools; None if the attempt
    is closed. `tools`: their digest, see `KeptTools`. `sealed`: whether there is an archive of the task's
    folder, `Start.sealed_file`.
    """

    sandbox: Sandbox
    driver: DriverClient | None
    session: ToolSession | None
    tools: str = ""
    sealed: bool = False

    @property
    def open_session(self) -> ToolSession:
        """The session of an attempt that is open, or about to be."""
        assert self.session is not None
        return self.session


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the links of a beginning work with."""

    episode: Episode
    resources: EpisodeResources
    admission: Admission
    offer: ToolOffer
    """The tools that the episode offers."""
    scratch: Path
    """Folder for the archives of the episode."""
    folder_of: Callable[[str], Path | None]
    """Returns the folder of another episode by its public id; None for an unknown episode."""
    stack: AsyncExitStack
    """Keeps the agent's sandbox open; closing the stack removes the sandbox."""

    @property
    def agent_name(self) -> str:
        """Name of the agent's sandbox."""
        return agent_sandbox(self.episode.public_id)

    @property
    def sealed_file(self) -> Path:
        """Archive of the task's folder as preprocess left it."""
        return self.scratch / SEALED_FILE

    @asynccontextmanager
    async def open_sandbox(
        self, name: str, image: str | None, open_new: OpenNew | None = None
    ) -> AsyncGenerator[Opened]:
        """Open the sandbox of preprocess or of the agent, as `SetUp.run` asks for it.

        `open_new`: what opens it, see `SandboxFactory.open`.
        """
        episode, factory, task = self.episode, self.episode.sandbox_factory, self.episode.spec.task
        is_agents = name == self.agent_name
        # Before it takes a place among the openings, which graders need to end other episodes.
        await self.admission.memory.wait()
        async with factory.open(
            name,
            factory.network_for(task),
            image=image,
            attached=self.resources.attached,
            records=episode.sandbox_records,
            role="agent" if is_agents else "preprocess",
            # A task that is graded in place is graded in this sandbox.
            dense=is_agents and not task.in_place,
            opening=self.admission.opening,
            open_new=open_new,
        ) as (sandbox, driver):
            facts = factory.suite_hooks.facts()
            episode.records.note_facts(image_digest=sandbox.image_digest, dense=sandbox.spec.dense, **facts)
            episode.note(agent=sandbox.spec.name)
            yield sandbox, driver


Following: TypeAlias = Callable[[], Awaitable[AgentSandbox]]
"""Begins the episode by the links that follow."""


class EpisodeHooks:
    """What hangs on the episodes of one server; each method has a default that does nothing."""

    def check(self, factory: SandboxFactory, spec: EpisodeSpec) -> None:
        """Refuse an episode before it starts. Raises DecathlonError."""

    async def begin(self, start: Start, following: Following) -> AgentSandbox:
        """Begin the episode, or let `following` do it. The sandbox is on `start.stack` then."""
        return await following()

    def acting(self, start: Start, agent: AgentSandbox) -> AbstractAsyncContextManager[object]:
        """Around the time in which the agent acts. The driver is there."""
        return nullcontext()

    async def captured(
        self, episode: Episode, attempt: Attempt, captured: CapturedWorkspace, *, in_place: bool
    ) -> None:
        """The attempt is closed and captured, and its grading begins. Raises nothing but cancellation."""


async def begin(hooks: Sequence[EpisodeHooks], start: Start) -> AgentSandbox:
    """Begin the episode by the first link that can."""
    if not start.episode.was_ready:
        require_whole_record(start.episode)

    async def after(count: int) -> AgentSandbox:
        if count == len(hooks):
            return await set_up(start)
        return await hooks[count].begin(start, partial(after, count + 1))

    return await after(0)


@asynccontextmanager
async def acting(hooks: Sequence[EpisodeHooks], start: Start, agent: AgentSandbox) -> AsyncGenerator[None]:
    """Enter what all hooks have around the time in which the agent acts."""
    async with AsyncExitStack() as stack:
        for one in hooks:
            await stack.enter_async_context(one.acting(start, agent))
        yield


async def set_up(start: Start) -> AgentSandbox:
    """Set the task up in a new sandbox, and offer its tools."""
    episode = start.episode
    async with start.admission.set_ups:
        prepared = await _prepare(start)
        if prepared.preprocess_failure:
            log.warning(
                "preprocess failed, which its suite ignores",
                extra=fields(
                    episode=episode.public_id, task=episode.spec.task_name, why=prepared.preprocess_failure
                ),
            )
            episode.trajectory.add("preprocess_failed", failure=prepared.preprocess_failure)
            episode.records.note_facts(preprocess_failure=prepared.preprocess_failure)
        tools = await start.offer.complete(prepared)
        sandbox, driver = prepared.sandbox, prepared.driver
        session = await start.offer.tool_session(sandbox, driver, running=prepared.servers)
    return AgentSandbox(sandbox, driver, session, tools, sealed=prepared.sealed is not None)


async def _prepare(start: Start) -> PreparedTask:
    """Open the agent's sandbox, after the sandbox of preprocess if there is one, and set the task up."""
    episode, factory = start.episode, start.episode.sandbox_factory

    def note_revision() -> None:
        read = SuiteRevision.read(factory.suite, episode.spec.task, factory.common_digest)
        episode.records.note_facts(
            suite_revision=read.revision, suite_release=read.release, suite_changed=read.changed
        )

    work = SetUp(
        suite=factory.suite,
        task=episode.spec.task,
        launch_time=episode.spec.launch_time,
        common=factory.common,
        scratch=start.scratch,
        limits=episode.spec.limits,
        credentials=start.resources.credentials,
        isolated=factory.provider.isolation != "none",
        before_reading=note_revision,
    )
    first = f"{episode.public_id}-preprocess" if work.has_two_sandboxes else start.agent_name
    if factory.root(first) != factory.root(start.agent_name):
        # Files that preprocess writes may contain absolute paths, so both sandboxes need the same root.
        # They can have the same name, as the first is removed before the second opens.
        first = start.agent_name
    return await work.run(
        start.stack,
        partial(start.open_sandbox, first),
        partial(start.open_sandbox, start.agent_name),
        start.offer.servers_to_start,
    )
