"""Opening the sandboxes of one suite: its provider, image, network and limits."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias, cast

from anyio import CapacityLimiter
from decathlon_sandbox import wire

from decathlon_mcp.driver.client import BOOT_COMMAND, DriverClient, connect
from decathlon_mcp.driver.stream import ReconnectPolicy
from decathlon_mcp.episodes.extensions import Opened, OpenNew, SandboxRole, SandboxSource, SuiteHooks, Web
from decathlon_mcp.episodes.records import SandboxRecords, sandbox_spec
from decathlon_mcp.episodes.tools.offered import ToolLists
from decathlon_mcp.events import Events, SandboxTaken
from decathlon_mcp.grading.fault import FaultFinder, ProviderHealth
from decathlon_mcp.sandboxes.base import Limits, Provider, Sandbox, SandboxSpec
from decathlon_mcp.storage.store import SandboxRow
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import Names, Network, ServerStart

Attached: TypeAlias = Callable[[Sandbox, DriverClient, SandboxRole, bool], AbstractAsyncContextManager[None]]
"""`EpisodeResources.attached`."""


def agent_sandbox(public_id: str) -> str:
    """Name of the sandbox of an episode's agent, unless one is taken that was opened ahead."""
    return f"{public_id}-agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFactory:
    """Opens sandboxes for the episodes of one suite."""

    suite: Suite
    provider: Provider
    image: str | None
    """Image of the sandboxes; None for a provider without images."""
    tool_names: Names
    network: Literal["auto", "none", "outbound"]
    """Of agents' sandboxes; `auto`: as the task needs."""
    limits: Limits
    common: Path
    """Archive of the files that every sandbox of the suite needs."""
    common_digest: str
    """Digest of the files in `common`."""
    reconnect: ReconnectPolicy = field(default_factory=ReconnectPolicy)
    """How long sandboxes wait for another server."""
    merge_pages: bool = False
    """Whether the memory of agents' sandboxes is merged."""
    suite_hooks: SuiteHooks = field(default_factory=SuiteHooks)
    """What a plug-in adds to the suite."""
    servers: ServerStart = "lazy"
    """When the task's servers start."""
    tool_lists: ToolLists | None = None
    """The suite's cached lists; None: every set-up starts all servers."""
    source: SandboxSource = field(default_factory=SandboxSource)
    """What has sandboxes that were opened ahead."""
    events: Events | None = None
    """Gets an event for each sandbox that an episode takes; None: nobody listens."""
    web: Web | None = None
    """What tasks get in place of a network; None: a network."""
    health: ProviderHealth = field(default_factory=ProviderHealth)
    """Health of the provider, shared by all suites that use the provider."""

    def network_for(self, task: Task) -> Network:
        """The network of the agent's sandbox; `auto` gives one only to tasks that need one."""
        if self.network != "auto":
            return self.network
        return "outbound" if task.needs.network and self.web is None else "none"

    def grader_network_for(self, task: Task) -> Network:
        """The network of the grader's sandbox. An evaluator may need one where the task does not."""
        if self.network != "auto":
            return self.network
        return "outbound" if task.grader_network and self.web is None else "none"

    def uses_web(self, task: Task, role: str | None = None) -> bool:
        """Whether a sandbox of this task in this role, or any of its sandboxes, gets the recorded web."""
        needed = {
            "preprocess": task.needs.network,
            "agent": task.needs.network,
            "grader": task.grader_network,
        }
        return self.web is not None and (any(needed.values()) if role is None else needed.get(role, False))

    def root(self, name: str) -> PurePosixPath:
        """The suite's root in a sandbox of that name, known before the sandbox opens."""
        return self.provider.root(self.spec(name, "none"))

    def agent_root(self, public_id: str) -> PurePosixPath:
        """The suite's root in the sandbox of an episode's agent."""
        return self.root(agent_sandbox(public_id))

    @asynccontextmanager
    async def open(
        self,
        name: str,
        network: Network,
        *,
        image: str | None = None,
        root: PurePosixPath | None = None,
        attached: Attached | None = None,
        records: SandboxRecords | None = None,
        role: SandboxRole = "agent",
        merge_pages: bool = False,
        opening: CapacityLimiter | None = None,
        open_new: OpenNew | None = None,
    ) -> AsyncGenerator[Opened]:
        """Open a sandbox and connect to its driver; both are gone on exit.

        A sandbox that was opened ahead has a name of its own, so use the name in its `spec`.

        `image` and `root` replace the suite's. `attached`: gives it what its episode's sandboxes share.
        `records`: of the episode to which it belongs; without them, and for services, no source is asked.
        `merge_pages`: merge equal memory pages of it and other sandboxes, if the settings allow it; never for
        a sandbox that grades. `opening`: limits how many sandboxes the provider creates at once; the place is
        free again before the driver has started. `open_new`: opens the sandbox in place of the source and
        this factory.
        """
        spec = self.spec(name, network, image=image, root=root, merge_pages=merge_pages)
        async with AsyncExitStack() as stack:
            # Rows are written before a sandbox can be used, and deleted after it is gone.
            rows = stack.enter_context(ExitStack())
            opened = taken = None
            may_be_ready = open_new is None and records is not None and role != "service"
            if may_be_ready:
                wanted = replace(spec, image=self.image)
                taken = await self.source.take(self.provider, wanted, self.open_new, image=image)
                if self.events is not None:
                    self.events.emit(SandboxTaken("cold" if taken is None else "warm"))
            if taken is not None:
                opened, remove = taken
                stack.push_async_callback(remove)
                spec = opened[0].spec
            elif may_be_ready or open_new is not None:
                self.source.give_way()
            if records is not None:
                records.insert(spec, self.provider, role)
                rows.callback(records.forget, spec.name)
            if opened is None:
                cold = self.open_new(spec, opening) if open_new is None else open_new(spec)
                opened = await stack.enter_async_context(cold)
                self.health.note_success(name.partition("-")[0])
            sandbox, driver = opened
            if attached is not None:
                await stack.enter_async_context(attached(sandbox, driver, role, False))
            yield sandbox, driver

    @asynccontextmanager
    async def open_new(
        self, spec: SandboxSpec, opening: CapacityLimiter | None = None
    ) -> AsyncGenerator[Opened]:
        """Open a new sandbox and connect to its driver, whatever the source has."""
        async with AsyncExitStack() as stack:
            async with opening or nullcontext():
                sandbox = await stack.enter_async_context(self.provider.open(spec))
            driver = await stack.enter_async_context(connect(sandbox, reconnect=self.reconnect))
            yield sandbox, driver

    def fault_finder(self, public_id: str) -> FaultFinder:
        """Decides whose fault a failure in a sandbox of an episode is."""

        @asynccontextmanager
        async def open_control() -> AsyncGenerator[Opened]:
            async with self.open_new(self.spec(f"control-{secrets.token_hex(8)}", "none")) as opened:
                yield opened

        return FaultFinder(public_id, self.health, open_control)

    def first_spec(self, task: Task) -> SandboxSpec:
        """Specification, without a name, of the first sandbox that an episode of this task opens."""
        # Preprocess has a sandbox of its own, whose pages are not merged.
        merge_pages = not task.in_place and task.files.preprocess is None
        return self.spec("", self.network_for(task), merge_pages=merge_pages)

    async def expect(self, spec: SandboxSpec) -> None:
        """Let sandboxes of this kind be opened ahead, before the first episode."""
        await self.source.expect(self.provider, spec, self.open_new)

    @asynccontextmanager
    async def reattach(
        self,
        row: SandboxRow,
        records: SandboxRecords,
        *,
        attached: Attached | None = None,
        unanswered: Collection[int] = (),
    ) -> AsyncGenerator[tuple[Sandbox, DriverClient | None]]:
        """Continue a sandbox that a dead server opened; it is gone on exit.

        `unanswered` as for `driver.client.connect`. There is no driver if it is paused, or has a driver of
        another wire version. Raises SandboxLostError.
        """
        spec = sandbox_spec(row)
        async with AsyncExitStack() as stack:
            stack.callback(records.forget, row.name)
            sandbox = await stack.enter_async_context(self.provider.reattach(row.owner, spec))
            if row.wire_version != wire.VERSION or not await sandbox.is_running():
                yield sandbox, None
                return
            connection = connect(sandbox, reconnect=self.reconnect, reattached=True, unanswered=unanswered)
            driver = await stack.enter_async_context(connection)
            if attached is not None:
                await stack.enter_async_context(
                    attached(sandbox, driver, cast("SandboxRole", row.role), True)
                )
            yield sandbox, driver

    def spec(
        self,
        name: str,
        network: Network,
        *,
        image: str | None = None,
        root: PurePosixPath | None = None,
        merge_pages: bool = False,
    ) -> SandboxSpec:
        """Specification of a sandbox whose first process is the driver; `root` defaults to the suite's."""
        return SandboxSpec(
            name=name,
            command=BOOT_COMMAND,
            root=root or self.suite.profile.root,
            image=image or self.image,
            network=network,
            limits=self.limits,
            survives=self.reconnect.seconds > 0,
            merge_pages=merge_pages and self.merge_pages,
        )


async def open_ahead(factories: Mapping[str, SandboxFactory]) -> None:
    """Open sandboxes ahead of the kind that most tasks of each suite need first."""
    for factory in factories.values():
        specs = Counter(factory.first_spec(task) for task in factory.suite.tasks.values())
        for spec, _ in specs.most_common(1):
            await factory.expect(spec)
