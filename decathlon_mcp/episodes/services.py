"""What tasks speak to beside their sandboxes: hosted by others, or in a sandbox of the episode's own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
from anyio.abc import ByteStream

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver_client.driver import DriverClient
from decathlon_mcp.driver_client.tunnels import Dialer
from decathlon_mcp.errors import SetUpError
from decathlon_mcp.suites.suite_file import Service

KNOCK_SECONDS = 5.0
OUTPUT_TAIL = 2000


@dataclass(frozen=True, slots=True)
class Services:
    """`targets`: what ports of the sandboxes' `localhost` lead to. `links`: to those in sandboxes of their
    own."""

    targets: Mapping[int, Dialer] = field(default_factory=dict[int, Dialer])
    drivers: Sequence[DriverClient] = ()

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        """Raise SandboxLostError as soon as one of them is lost: nobody can be graded without."""
        lost: list[DriverClient] = []
        with anyio.CancelScope() as body:
            async with background_tasks() as tasks:

                async def watch(driver: DriverClient) -> None:
                    await driver.closed.wait()
                    lost.append(driver)
                    body.cancel()

                for driver in self.drivers:
                    tasks.start_soon(watch, driver)
                yield
        if lost:
            raise await lost[0].closed_error()


def hosted(service: Service) -> dict[int, Dialer]:
    """The ports of a service that is hosted by others."""
    return {port: partial(_dial, *target) for port, target in service.targets.items()}


async def _dial(host: str, port: int) -> ByteStream:
    return await anyio.connect_tcp(host, port)


async def check_reachable(name: str, service: Service) -> None:
    """Raise SetUpError where nothing answers at any port of a hosted service."""
    answered: list[int] = []

    async def try_one(host: str, port: int) -> None:
        try:
            with anyio.fail_after(KNOCK_SECONDS):
                await (await _dial(host, port)).aclose()
        except (OSError, TimeoutError):
            return
        answered.append(port)

    async with anyio.create_task_group() as tasks:
        for target in service.targets.values():
            tasks.start_soon(try_one, *target)
    if service.targets and not answered:
        raise SetUpError(f"the service {name} does not answer at {' or '.join(service.ports.values())}")


async def start(
    name: str, service: Service, driver: DriverClient, *, root: str, timeout_seconds: float
) -> None:
    """Start a service in the sandbox that is its own. Raises SetUpError with its last words."""
    result = await driver.run(service.start, cwd=root, timeout_seconds=timeout_seconds, leave=True)
    if result.exit_code != 0:
        said = (result.stderr.strip() or result.stdout.strip())[-OUTPUT_TAIL:]
        how = "took too long" if result.timed_out else f"exit code {result.exit_code}"
        raise SetUpError(f"the service {name} did not start ({how}): {said}")


def in_sandbox(ports: Iterable[int], driver: DriverClient) -> dict[int, Dialer]:
    """The ports of a service that runs in a sandbox of its own."""
    return {port: partial(driver.dial, port) for port in ports}
