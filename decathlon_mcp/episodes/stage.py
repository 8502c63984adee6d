"""What the episodes of one suite are played on: its provider, its image, its network, its limits."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from decathlon_mcp.episodes.local_tools import LocalTools
from decathlon_mcp.link import BOOT_COMMAND, Link, connect
from decathlon_mcp.model import Names, Network
from decathlon_mcp.providers.base import Limits, Provider, Sandbox, SandboxSpec
from decathlon_mcp.suites import Suite, Task


@dataclass(frozen=True, slots=True)
class Stage:
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
        self, name: str, network: Network, *, image: str | None = None
    ) -> AsyncGenerator[tuple[Sandbox, Link]]:
        """A fresh sandbox with its driver booted; gone on exit. `image`: instead of the stage's."""
        spec = self._spec(name, network, image or self.image)
        async with self.provider.open(spec) as sandbox, connect(sandbox) as link:
            yield sandbox, link

    def _spec(self, name: str, network: Network, image: str | None = None) -> SandboxSpec:
        return SandboxSpec(
            name=name,
            command=BOOT_COMMAND,
            root=self.suite.dialect.root,
            image=image,
            network=network,
            limits=self.limits,
        )
