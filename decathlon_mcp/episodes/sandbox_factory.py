"""What the episodes of one suite are played on: its provider, its image, its network, its limits."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from decathlon_mcp.driver_client.driver import BOOT_COMMAND, DriverClient, connect
from decathlon_mcp.driver_client.tunnels import Dialer
from decathlon_mcp.episodes.local_tools import LocalTools
from decathlon_mcp.episodes.services import Services, check_reachable, hosted, in_sandbox, start
from decathlon_mcp.errors import ImageError, SetUpError
from decathlon_mcp.sandboxes.base import Limits, Provider, Sandbox, SandboxSpec
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.suite_file import Service
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import Names, Network

ROOT = PurePosixPath("/service")
"""Where what is written beside a service goes, in a sandbox of its own."""


@dataclass(frozen=True, slots=True)
class SandboxFactory:
    """`common` is the archive of what every sandbox of the suite needs; made once per suite revision."""

    suite: Suite
    provider: Provider
    image: str | None
    names: Names
    network: Literal["auto", "none", "outbound"]
    limits: Limits
    common: Path
    cuts_overlong: bool = False
    local_tools: LocalTools = field(default_factory=LocalTools)

    def network_for(self, task: Task) -> Network:
        """`auto` is none for a task that needs none."""
        if self.network != "auto":
            return self.network
        return "outbound" if task.needs.network else "none"

    def grader_network_for(self, task: Task) -> Network:
        """Decided apart: an evaluator may need a network where the task needs none, and the other way."""
        if self.network != "auto":
            return self.network
        return "outbound" if task.grader_network else "none"

    def root(self, name: str) -> PurePosixPath:
        """Where the suite will live in a sandbox of that name."""
        return self.provider.root(self._spec(name, "none"))

    @asynccontextmanager
    async def open(
        self, name: str, network: Network, *, image: str | None = None, services: Services | None = None
    ) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
        """A fresh sandbox with its driver booted; gone on exit. `image`: instead of the stage's.

        `services`: what its `localhost` leads to, unless that is the machine's own.
        """
        spec = self._spec(name, network, image or self.image)
        async with self.provider.open(spec) as sandbox, connect(sandbox) as driver:
            if services is not None and services.targets and not self.provider.shares_loopback(spec):
                await driver.forward(services.targets)
            yield sandbox, driver

    @asynccontextmanager
    async def services(self, task: Task, label: str, *, seconds: float) -> AsyncGenerator[Services]:
        """What a task speaks to beside its sandboxes, answering; what of it is in sandboxes is gone on exit.

        Raises SetUpError for a service that does not answer, or not within so many seconds.
        """
        targets: dict[int, Dialer] = {}
        drivers: list[DriverClient] = []
        async with AsyncExitStack() as sandboxes:
            for name, service in self.suite.services(task).items():
                if service.image is None:
                    await check_reachable(name, service)
                    targets |= hosted(service)
                    continue
                drivers.append(
                    driver := await sandboxes.enter_async_context(self._beside(name, service, label))
                )
                await start(name, service, driver, root=str(ROOT), timeout_seconds=seconds)
                targets |= in_sandbox(service.ports, driver)
            yield Services(targets, tuple(drivers))

    @asynccontextmanager
    async def _beside(self, name: str, service: Service, label: str) -> AsyncGenerator[DriverClient]:
        """A sandbox for a service. Raises SetUpError where there can be none."""
        if self.provider.isolation == "none":
            raise SetUpError(f"the service {name} wants a container, which the local provider has not")
        place = f"{label}-{re.sub('[^a-z0-9]+', '-', name.lower())}"[:63]
        async with AsyncExitStack() as opened:
            try:
                spec = replace(self._spec(place, "none", service.image), root=ROOT)
                sandbox = await opened.enter_async_context(self.provider.open(spec))
            except ImageError as error:
                cure = f": {service.cure}" if service.cure else f" ({error.message})"
                raise SetUpError(f"there is no image {service.image} for the service {name}{cure}") from error
            yield await opened.enter_async_context(connect(sandbox))

    def _spec(self, name: str, network: Network, image: str | None = None) -> SandboxSpec:
        return SandboxSpec(
            name=name,
            command=BOOT_COMMAND,
            root=self.suite.profile.root,
            image=image,
            network=network,
            limits=self.limits,
        )
