"""Beginnings of episodes: a chain, whose last link sets the task up in a new sandbox.

A link begins the episode itself, or asks the link that follows it. So it can hold others back meanwhile, and
it knows when the set-up is done, before the episode is READY. The links of a server are its plug-ins'; an
episode of a dead server has one before them, which reattaches to its sandbox (`recovery`).

Here is also what all sandboxes of an episode share: credentials, and the resources that plug-ins open.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import anyio
import anyio.to_thread

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.extensions import EpisodeResource, Opened, OpenNew, SandboxRole
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory, agent_sandbox
from decathlon_mcp.episodes.specification import EpisodeSpec
from decathlon_mcp.episodes.tools.offer import ToolOffer
from decathlon_mcp.episodes.tools.tool_session import ToolSession
from decathlon_mcp.errors import SetUpError
from decathlon_mcp.grading.attempt import Attempt
from decathlon_mcp.grading.inputs import CapturedWorkspace
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.suites.tasks import Task

SEALED_FILE = "sealed.tar"
"""Archive of the task's folder after preprocess, in the episode's scratch folder."""


@dataclass(frozen=True, slots=True)
class EpisodeResources:
    """What all sandboxes of an episode share. `credentials`: archives, each with its target folder."""

    credentials: Sequence[tuple[PurePosixPath, bytes]] = ()
    opened: Sequence[EpisodeResource] = ()

    @asynccontextmanager
    async def attached(
        self, sandbox: Sandbox, driver: DriverClient, role: SandboxRole, reattached: bool
    ) -> AsyncGenerator[None]:
        """Give a sandbox what it gets of each, in the body; see `EpisodeResource.attached`."""
        async with AsyncExitStack() as stack:
            for resource in self.opened:
                await stack.enter_async_context(resource.attached(sandbox, driver, role, reattached))
            yield

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        """Cancel the body and raise SandboxLostError as soon as a sandbox of a resource is lost."""
        drivers = [driver for resource in self.opened for driver in resource.drivers]
        with anyio.CancelScope() as body:
            for driver in drivers:
                driver.closed.on_set(body.cancel)
            try:
                yield
            finally:
                for driver in drivers:
                    driver.closed.forget(body.cancel)
        if body.cancelled_caught:
            raise await next(driver for driver in drivers if driver.closed.is_set()).closed_error()

    async def reported(self, verdict: Verdict) -> Verdict:
        """The verdict with what the resources report."""
        for resource in self.opened:
            verdict = verdict.model_copy(update=await resource.facts())
        return verdict


@asynccontextmanager
async def open_resources(episode: Episode, admission: Admission) -> AsyncGenerator[EpisodeResources]:
    """Open what all sandboxes of an episode share; it is gone on exit.

    Raises SetUpError, and SandboxLostError for a service of a dead server's episode that is gone.
    """
    factory, task, public_id = episode.sandbox_factory, episode.spec.task, episode.public_id
    credentials = await read_credentials(factory, task, episode.ticket.accounts)
    async with AsyncExitStack() as stack:
        resources: list[EpisodeResource] = []
        if factory.suite.services(task):
            part = next((plugin.services for plugin in plugins() if plugin.services), None)
            if part is None:
                names = ", ".join(factory.suite.services(task))
                raise SetUpError(f"the task needs {names}, and this server has no plug-in for services")
            async with admission.set_ups:
                opened = load(part)(
                    factory,
                    task,
                    public_id,
                    start_seconds=episode.spec.limits.servers_seconds,
                    records=episode.sandbox_records,
                    reattaches=episode.was_ready,
                )
                resources.append(await stack.enter_async_context(opened))
        if factory.web is not None and factory.uses_web(task):
            web = factory.web.episode(factory, task, public_id, episode.spec.launch_time)
            resources.append(await stack.enter_async_context(web))
        yield EpisodeResources(credentials, resources)


async def read_credentials(
    factory: SandboxFactory, task: Task, accounts: Mapping[str, str]
) -> Sequence[tuple[PurePosixPath, bytes]]:
    """The archives of a task's credentials. `accounts`: the slot that the episode has of each account.

    Raises SetUpError if a file belongs outside the suite's root and the provider has no containers.
    """
    credentials = await anyio.to_thread.run_sync(factory.suite.resources.credential_archives, task, accounts)
    if factory.provider.isolation == "none" and any(folder.is_absolute() for folder, _ in credentials):
        raise SetUpError(
            "the task's credentials go to paths outside of the suite, which only a container has"
        )
    return credentials


@dataclass(frozen=True, slots=True)
class AgentSandbox:
    """An agent's sandbox that is set up, with the tools that it offers.

    `driver`: None if the sandbox was paused after the claim. `session`: calls the tools; None if the attempt
    is closed. `tools`: their digest, see `KeptTools`. `sealed`: whether there is an archive of the task's
    folder, `Start.task_folder_archive`.
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
    def task_folder_archive(self) -> Path:
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
            merge_pages=is_agents and not task.in_place,
            opening=self.admission.opening,
            open_new=open_new,
        ) as (sandbox, driver):
            facts = factory.suite_hooks.facts()
            merged = sandbox.spec.merge_pages
            episode.records.note_facts(image_digest=sandbox.image_digest, dense=merged, **facts)
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
