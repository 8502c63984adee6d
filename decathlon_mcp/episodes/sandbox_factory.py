"""Opening the sandboxes of one suite: its provider, image, network and limits."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from decathlon_mcp.driver_client.driver import (
    BOOT_COMMAND,
    DEFAULT_REPLY_BYTES,
    DriverClient,
    Survival,
    connect,
)
from decathlon_mcp.driver_client.tunnels import Dialer
from decathlon_mcp.episodes.records import EpisodeRecords, SandboxRole, sandbox_spec
from decathlon_mcp.episodes.tool_lists import ToolLists
from decathlon_mcp.episodes.tools import LocalTools
from decathlon_mcp.sandboxes.base import Limits, Provider, Sandbox, SandboxSpec
from decathlon_mcp.storage.store import SandboxRow
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import Names, Network, ServerStart


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFactory:
    """Opens sandboxes for the episodes of one suite.

    `image` is None for a provider without images. `common` is the archive of the files that every sandbox of
    the suite needs, `common_digest` identifies them. `cuts_overlong`: whether overlong replies of tools are
    cut, as Toolathlon does. `reply_bytes`: longest reply of a tool, after that. `survival`: how long
    sandboxes wait for another server. `local_tools` holds the definitions that all episodes of the suite
    share. `servers`: when the task's servers start. `tool_lists`: the suite's cached ones; None: every set-up
    starts all servers.
    """

    suite: Suite
    provider: Provider
    image: str | None
    tool_names: Names
    network: Literal["auto", "none", "outbound"]
    limits: Limits
    common: Path
    common_digest: str
    cuts_overlong: bool = False
    reply_bytes: int = DEFAULT_REPLY_BYTES
    survival: Survival = field(default_factory=Survival)
    local_tools: LocalTools = field(default_factory=LocalTools)
    servers: ServerStart = "lazy"
    tool_lists: ToolLists | None = None

    def network_for(self, task: Task) -> Network:
        """The network of the agent's sandbox; `auto` gives one only to tasks that need one."""
        if self.network != "auto":
            return self.network
        return "outbound" if task.needs.network else "none"

    def grader_network_for(self, task: Task) -> Network:
        """The network of the grader's sandbox. An evaluator may need one where the task does not."""
        if self.network != "auto":
            return self.network
        return "outbound" if task.grader_network else "none"

    def root(self, name: str) -> PurePosixPath:
        """The suite's root in a sandbox of that name, known before the sandbox opens."""
        return self.provider.root(self.spec(name, "none"))

    @asynccontextmanager
    async def open(
        self,
        name: str,
        network: Network,
        *,
        image: str | None = None,
        root: PurePosixPath | None = None,
        forwards: Mapping[int, Dialer] | None = None,
        records: EpisodeRecords | None = None,
        role: SandboxRole = "agent",
    ) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
        """Open a sandbox and connect to its driver; both are gone on exit.

        `image` and `root` replace the suite's. `forwards`: ports of the sandbox's `localhost` and what they
        connect to; ignored if the sandbox shares the loopback interface of its machine. `records`: of the
        episode to which the sandbox belongs.
        """
        spec = self.spec(name, network, image=image, root=root)
        async with AsyncExitStack() as stack:
            if records is not None:
                stack.enter_context(records.sandbox(spec, self.provider.name, role))
            sandbox = await stack.enter_async_context(self.provider.open(spec))
            driver = await stack.enter_async_context(
                connect(sandbox, reply_bytes=self.reply_bytes, survival=self.survival)
            )
            await self._forward(spec, driver, forwards)
            yield sandbox, driver

    @asynccontextmanager
    async def take_back(
        self,
        row: SandboxRow,
        records: EpisodeRecords,
        *,
        forwards: Mapping[int, Dialer] | None = None,
        unanswered: Collection[int] = (),
    ) -> AsyncGenerator[tuple[Sandbox, DriverClient | None]]:
        """Continue a sandbox that a dead server opened; it is gone on exit.

        `unanswered` as for `driver_client.connect`. There is no driver for one that is paused. Raises
        SandboxLostError.
        """
        spec = sandbox_spec(row)
        with records.taken_back(row):
            async with AsyncExitStack() as stack:
                sandbox = await stack.enter_async_context(self.provider.take_back(row.owner, spec))
                if not await sandbox.is_running():
                    yield sandbox, None
                    return
                driver = await stack.enter_async_context(
                    connect(
                        sandbox,
                        reply_bytes=self.reply_bytes,
                        survival=self.survival,
                        taken_back=True,
                        unanswered=unanswered,
                    )
                )
                await self._forward(spec, driver, forwards)
                yield sandbox, driver

    async def _forward(
        self, spec: SandboxSpec, driver: DriverClient, forwards: Mapping[int, Dialer] | None
    ) -> None:
        if forwards and not self.provider.shares_loopback(spec):
            await driver.forward(forwards)

    def spec(
        self, name: str, network: Network, *, image: str | None = None, root: PurePosixPath | None = None
    ) -> SandboxSpec:
        """Specification of a sandbox whose first process is the driver; `root` defaults to the suite's."""
        return SandboxSpec(
            name=name,
            command=BOOT_COMMAND,
            root=root or self.suite.profile.root,
            image=image or self.image,
            network=network,
            limits=self.limits,
            survives=self.survival.seconds > 0,
        )
