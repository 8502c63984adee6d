"""What all sandboxes of an episode share: credentials, and the services and the web that plug-ins open."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import anyio
import anyio.to_thread

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.driver.tunnels import Dialer
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.extensions import EpisodeWeb
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import SetUpError
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.suites.tasks import Task


@dataclass(frozen=True, slots=True)
class Services:
    """The running services of an episode.

    `targets`: the ports of a sandbox's `localhost` and how to connect to the service behind each. `drivers`:
    the drivers of the services that run in sandboxes.
    """

    targets: Mapping[int, Dialer] = field(default_factory=dict[int, Dialer])
    drivers: Sequence[DriverClient] = ()

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        """Cancel the body and raise SandboxLostError as soon as the sandbox of a service is lost."""
        with anyio.CancelScope() as body:
            for driver in self.drivers:
                driver.closed.on_set(body.cancel)
            try:
                yield
            finally:
                for driver in self.drivers:
                    driver.closed.forget(body.cancel)
        if body.cancelled_caught:
            raise await next(driver for driver in self.drivers if driver.closed.is_set()).closed_error()


@dataclass(frozen=True, slots=True)
class EpisodeResources:
    """What all sandboxes of an episode share.

    `credentials`: archives, each with its target folder. `web`: None if the task does not use the recorded
    web.
    """

    factory: SandboxFactory
    task: Task
    services: Services = field(default_factory=Services)
    credentials: Sequence[tuple[PurePosixPath, bytes]] = ()
    web: EpisodeWeb | None = None

    @asynccontextmanager
    async def attached(
        self, sandbox: Sandbox, driver: DriverClient, role: str, taken_back: bool
    ) -> AsyncGenerator[None]:
        """Give a sandbox the services, and the web if it uses it, in the body.

        `taken_back`: an earlier server process has done that. Raises SetUpError.
        """
        provider, web = self.factory.provider, self.web
        shares_loopback = provider.shares_loopback(sandbox.spec)
        if self.services.targets and not shares_loopback:
            await driver.forward(self.services.targets)
        if web is None or not self.factory.uses_web(self.task, role):
            yield
            return
        assert role in ("agent", "preprocess", "grader"), "no other role uses the web"
        async with web.connected(
            sandbox,
            driver,
            role,
            shares_loopback=shares_loopback,
            # Elsewhere the files belong to the machine, or to an image that other sandboxes use too.
            has_own_files=provider.isolation == "container",
            taken_back=taken_back,
        ):
            yield

    async def with_web(self, verdict: Verdict) -> Verdict:
        """The verdict with how the requests to the recorded web were answered."""
        return verdict if self.web is None else verdict.model_copy(update={"web": await self.web.use()})


@asynccontextmanager
async def open_resources(episode: Episode, admission: Admission) -> AsyncGenerator[EpisodeResources]:
    """Open what all sandboxes of an episode share; it is gone on exit.

    Raises SetUpError, and SandboxLostError for a service of a dead server's episode that is gone.
    """
    factory, task, public_id = episode.sandbox_factory, episode.spec.task, episode.public_id
    credentials = await read_credentials(factory, task, episode.ticket.accounts)
    async with AsyncExitStack() as stack:
        services = Services()
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
                services = await stack.enter_async_context(opened)
        web: EpisodeWeb | None = None
        if factory.web is not None and factory.uses_web(task):
            web = await stack.enter_async_context(
                factory.web.episode(factory.suite, task, public_id, episode.spec.launch_time)
            )
        yield EpisodeResources(factory, task, services, credentials, web)


async def read_credentials(
    factory: SandboxFactory, task: Task, accounts: Mapping[str, str]
) -> Sequence[tuple[PurePosixPath, bytes]]:
    """The archives of a task's credentials. `accounts`: the slot that the episode has of each account.

    Raises SetUpError if a file belongs outside the suite's root and the provider has no containers.
    """
    credentials = await anyio.to_thread.run_sync(factory.suite.credentials, task, accounts)
    if factory.provider.isolation == "none" and any(folder.is_absolute() for folder, _ in credentials):
        raise SetUpError(
            "the task's credentials go to paths outside of the suite, which only a container has"
        )
    return credentials
