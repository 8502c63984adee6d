"""How an episode begins: a chain, whose last link sets the task up in a new sandbox.

A link begins the episode itself, or asks the link that follows it. So it can hold others back meanwhile, and
it knows when the set-up is done, before the episode is READY. The links of a server are its plug-ins'; an
episode of a dead server has one before them, which reattaches to its sandbox (`reattach`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.extensions import Opened, OpenNew
from decathlon_mcp.episodes.resources import EpisodeResources
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory, agent_sandbox
from decathlon_mcp.episodes.specification import EpisodeSpec
from decathlon_mcp.episodes.tools.offer import ToolOffer
from decathlon_mcp.episodes.tools.session import ToolSession
from decathlon_mcp.grading.attempt import Attempt
from decathlon_mcp.grading.job import CapturedWorkspace
from decathlon_mcp.sandboxes.base import Sandbox

SEALED_FILE = "sealed.tar"
"""Archive of the task's folder after preprocess, in the episode's scratch folder."""


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
        """Open the sandbox of preprocess or of the agent: of this image, by default the suite's.

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
