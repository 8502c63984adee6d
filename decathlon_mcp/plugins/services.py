"""The services of an episode, which all of its sandboxes share.

A service is either external, at an address of its own, or runs in a sandbox that belongs to the episode.
Either way a task reaches it at a port of its sandbox's `localhost`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import PurePosixPath

import anyio
import anyio.to_thread

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.driver.transfers import put_archive
from decathlon_mcp.episodes.extensions import EpisodeResource, SandboxRole
from decathlon_mcp.episodes.records import SandboxRecords
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import ImageError, SandboxLostError, SetUpError
from decathlon_mcp.plugins.tunnels import Dialer, dial, forward
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.suites.suite_file import Service
from decathlon_mcp.suites.tasks import Task

OUTPUT_TAIL = 2000
SERVICE_ROOT = PurePosixPath("/service")
"""Working folder of a service in its own sandbox."""


class Services(EpisodeResource):
    """The running services of an episode.

    `targets`: the ports of a sandbox's `localhost` and how to connect to the service behind each. `drivers`:
    the drivers of the services that run in sandboxes.
    """

    def __init__(
        self, factory: SandboxFactory, targets: Mapping[int, Dialer], drivers: Sequence[DriverClient] = ()
    ) -> None:
        self._factory = factory
        self.targets = targets
        self.drivers = drivers

    @asynccontextmanager
    async def attached(
        self, sandbox: Sandbox, driver: DriverClient, role: SandboxRole, reattached: bool
    ) -> AsyncGenerator[None]:
        """Let the sandbox reach the services."""
        if self.targets and not self._factory.provider.shares_loopback(sandbox.spec):
            await forward(driver, self.targets)
        yield


@asynccontextmanager
async def open_services(
    factory: SandboxFactory,
    task: Task,
    episode: str,
    *,
    start_seconds: float,
    records: SandboxRecords,
    reattaches: bool = False,
) -> AsyncGenerator[Services]:
    """Check a task's external services and start the others; the sandboxes of these are gone on exit.

    `episode`: the public id, with which the sandboxes' names begin. `reattaches`: the services run, and are
    not started, in sandboxes that `records` has from a dead server. Raises SetUpError for a service that
    cannot be reached, or does not start within `start_seconds`, and SandboxLostError for a sandbox that is
    gone.
    """
    targets: dict[int, Dialer] = {}
    drivers: list[DriverClient] = []
    async with AsyncExitStack() as sandboxes:
        for name, service in factory.suite.services(task).items():
            if service.image is None:
                await check_reachable(name, service)
                targets |= {
                    port: partial(anyio.connect_tcp, *target) for port, target in service.targets.items()
                }
                continue
            sandbox_name = f"{episode}-{re.sub('[^a-z0-9]+', '-', name.lower())}"[:63]
            if reattaches:
                row = records.former.get(sandbox_name)
                if row is None:
                    raise SandboxLostError(f"the service {name} had no sandbox when its server died")
                _, driver = await sandboxes.enter_async_context(factory.reattach(row, records))
                if driver is None:
                    raise SandboxLostError(f"the sandbox of the service {name} does not run any more")
            else:
                sandbox, driver = await _open_sandbox(
                    sandboxes, factory, name, service, sandbox_name, records
                )
                if service.files:
                    files = await anyio.to_thread.run_sync(factory.suite.resources.service_archive, service)
                    await put_archive(sandbox, driver, SERVICE_ROOT, files)
                await _start_service(name, service, driver, timeout_seconds=start_seconds)
            drivers.append(driver)
            targets |= {port: partial(dial, driver, port) for port in service.ports}
        yield Services(factory, targets, tuple(drivers))


async def check_reachable(name: str, service: Service) -> None:
    """Raise SetUpError if no port of an external service accepts a connection."""
    reachable: list[int] = []

    async def try_port(host: str, port: int) -> None:
        try:
            with anyio.fail_after(5):  # it listens on this machine or near it, or not at all
                await (await anyio.connect_tcp(host, port)).aclose()
        except (OSError, TimeoutError):
            return
        reachable.append(port)

    async with anyio.create_task_group() as tasks:
        for target in service.targets.values():
            tasks.start_soon(try_port, *target)
    if service.targets and not reachable:
        raise SetUpError(f"the service {name} does not answer at {' or '.join(service.ports.values())}")


async def _open_sandbox(
    stack: AsyncExitStack,
    factory: SandboxFactory,
    name: str,
    service: Service,
    sandbox_name: str,
    records: SandboxRecords,
) -> tuple[Sandbox, DriverClient]:
    """Open the sandbox of a service. Raises SetUpError if the provider or the image does not allow it."""
    if factory.provider.isolation != "container":
        raise SetUpError(
            f"the service {name} needs a container, which the {factory.provider.name} provider cannot open"
        )
    opening = factory.open(
        sandbox_name, "none", image=service.image, root=SERVICE_ROOT, records=records, role="service"
    )
    try:
        return await stack.enter_async_context(opening)
    except ImageError as error:
        cure = f": {service.cure}" if service.cure else f" ({error.message})"
        raise SetUpError(f"there is no image {service.image} for the service {name}{cure}") from error


async def _start_service(
    name: str, service: Service, driver: DriverClient, *, timeout_seconds: float
) -> None:
    """Run the start command of a service in its sandbox. Raises SetUpError with the end of its output."""
    result = await driver.run(
        service.start, cwd=str(SERVICE_ROOT), timeout_seconds=timeout_seconds, leave=True
    )
    if result.exit_code != 0:
        output = (result.stderr.strip() or result.stdout.strip())[-OUTPUT_TAIL:]
        reason = "took too long" if result.timed_out else f"exit code {result.exit_code}"
        raise SetUpError(f"the service {name} did not start ({reason}): {output}")
