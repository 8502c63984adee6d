"""Opening the sandboxes of one suite: its provider, image, network and limits."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from anyio import CapacityLimiter
from decathlon_sandbox import wire

from decathlon_mcp.driver.client import BOOT_COMMAND, DriverClient, connect
from decathlon_mcp.driver.stream import ReconnectPolicy
from decathlon_mcp.driver.tunnels import Dialer
from decathlon_mcp.episodes.records import SandboxRecords, SandboxRole, StoredEpisode, sandbox_spec
from decathlon_mcp.episodes.sandbox_sources import Opened, OpenNew, SandboxSources
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.episodes.suite_hooks import SuiteHooks
from decathlon_mcp.episodes.tools.cache import ToolLists
from decathlon_mcp.episodes.web import EpisodeWeb, Web
from decathlon_mcp.grading.attempt import TruncationCause
from decathlon_mcp.grading.evaluation import UNGRADED
from decathlon_mcp.grading.fault import FaultFinder, ProviderHealth
from decathlon_mcp.sandboxes.base import Limits, Provider, Sandbox, SandboxSpec, kernel_of
from decathlon_mcp.storage.store import SandboxRow
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import Names, Network, ServerStart


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
    limits: Limits
    common: Path
    """Archive of the files that every sandbox of the suite needs."""
    common_digest: str
    """Digest of the files in `common`."""
    cuts_overlong: bool = False
    """Whether overlong replies of tools are cut, as Toolathlon does."""
    grades_truncated: bool = True
    """Whether an attempt that a limit ended is graded."""
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
    sources: SandboxSources = field(default_factory=SandboxSources)
    """Sources of sandboxes that were opened ahead."""
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

    def uses_web(self, task: Task, role: SandboxRole | None = None) -> bool:
        """Whether a sandbox of this task in this role, or any of its sandboxes, gets the recorded web."""
        needed = {
            "preprocess": task.needs.network,
            "agent": task.needs.network,
            "grader": task.grader_network,
        }
        return self.web is not None and (any(needed.values()) if role is None else needed.get(role, False))

    def grades(self, cause: TruncationCause | None) -> bool:
        """Whether an attempt that was cut short by this is graded; if not, its reward is 0."""
        return cause is None or self.grades_truncated or cause not in UNGRADED

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
        forwards: Mapping[int, Dialer] | None = None,
        records: SandboxRecords | None = None,
        role: SandboxRole = "agent",
        merge_pages: bool = False,
        opening: CapacityLimiter | None = None,
        web: EpisodeWeb | None = None,
        open_new: OpenNew | None = None,
    ) -> AsyncGenerator[Opened]:
        """Open a sandbox and connect to its driver; both are gone on exit.

        A sandbox that was opened ahead has a name of its own, so use the name in its `spec`.

        `image` and `root` replace the suite's. `forwards`: ports of the sandbox's `localhost` and what they
        connect to; ignored if the sandbox shares the loopback interface of its machine. `records`: the rows
        of the episode to which the sandbox belongs; without them, and for services, no source is asked.
        `merge_pages`: merge its memory with that of other sandboxes, if the settings allow it; never for a
        sandbox that grades. `opening`: limits how many sandboxes the provider creates at once; the place is
        free again before the driver has started. `web`: the recorded web that the sandbox gets. `open_new`:
        opens the sandbox in place of the sources and this factory.
        """
        spec = self.spec(name, network, image=image, root=root, merge_pages=merge_pages)
        async with AsyncExitStack() as stack:
            # Rows are written before a sandbox can be used, and deleted after it is gone.
            rows = stack.enter_context(ExitStack())
            ready = None
            if open_new is not None:
                self.sources.give_way()
            elif records is not None and role != "service":
                wanted = replace(spec, image=self.image)
                ready = await self.sources.take(self.provider, wanted, self.open_new, image=image)
            if ready is not None:
                stack.push_async_callback(ready.remove)
                spec = ready.spec
            if records is not None:
                rows.enter_context(records.sandbox(spec, self.provider, role))
            if ready is not None:
                sandbox, driver = ready.opened
            else:
                cold = self.open_new(spec, opening) if open_new is None else open_new(spec)
                sandbox, driver = await stack.enter_async_context(cold)
                self.health.note_success(name.partition("-")[0])
            await self._forward(spec, driver, forwards)
            if web is not None:
                await stack.enter_async_context(self._web(web, sandbox, driver, role))
            yield sandbox, driver

    @asynccontextmanager
    async def open_new(
        self, spec: SandboxSpec, opening: CapacityLimiter | None = None
    ) -> AsyncGenerator[Opened]:
        """Open a new sandbox and connect to its driver, whatever the sources have."""
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
        merge_pages = not task.in_place and not task.has_preprocess
        return self.spec("", self.network_for(task), merge_pages=merge_pages)

    async def expect(self, spec: SandboxSpec) -> None:
        """Let sandboxes of this kind be opened ahead, before the first episode."""
        await self.sources.expect(self.provider, spec, self.open_new)

    def obstacle(self, episode: StoredEpisode) -> str | None:
        """Why a sandbox that a dead server's episode needs cannot be taken back here; None if it can be."""
        for row in episode.needed_sandboxes:
            provider = self.provider
            opened = (row.provider, row.isolation, row.spec.get("kernel"))
            here = (provider.name, provider.isolation, kernel_of(provider))
            if opened != here:
                return f"its sandbox has {_described(*opened)}, and this server has {_described(*here)}"
            # The workspace of a closed attempt is copied without the driver.
            is_copied = (
                episode.phase is Phase.CLAIMED and row.role == "agent" and not episode.spec.task.in_place
            )
            if row.wire_version != wire.VERSION and not is_copied:
                return (
                    f"its sandbox's driver has wire version {row.wire_version}, and this server has "
                    f"{wire.VERSION}"
                )
        return None

    @asynccontextmanager
    async def reattach(
        self,
        row: SandboxRow,
        records: SandboxRecords,
        *,
        forwards: Mapping[int, Dialer] | None = None,
        web: EpisodeWeb | None = None,
        unanswered: Collection[int] = (),
    ) -> AsyncGenerator[tuple[Sandbox, DriverClient | None]]:
        """Continue a sandbox that a dead server opened; it is gone on exit.

        `unanswered` as for `driver.client.connect`. There is no driver if it is paused, or has a driver of
        another wire version. Raises SandboxLostError.
        """
        spec = sandbox_spec(row)
        with records.reattached(row):
            async with AsyncExitStack() as stack:
                sandbox = await stack.enter_async_context(self.provider.reattach(row.owner, spec))
                if row.wire_version != wire.VERSION or not await sandbox.is_running():
                    yield sandbox, None
                    return
                driver = await stack.enter_async_context(
                    connect(
                        sandbox,
                        reconnect=self.reconnect,
                        reattached=True,
                        unanswered=unanswered,
                    )
                )
                await self._forward(spec, driver, forwards)
                if web is not None:
                    await stack.enter_async_context(
                        self._web(web, sandbox, driver, row.role, reattached=True)
                    )
                yield sandbox, driver

    def _web(
        self,
        web: EpisodeWeb,
        sandbox: Sandbox,
        driver: DriverClient,
        role: str,
        *,
        reattached: bool = False,
    ) -> AbstractAsyncContextManager[None]:
        assert role in ("agent", "preprocess", "grader"), "a service has no web"
        return web.connected(
            sandbox,
            driver,
            role,
            shares_loopback=self.provider.shares_loopback(sandbox.spec),
            # Elsewhere the files belong to the machine, or to an image that other sandboxes use too.
            has_own_files=self.provider.isolation == "container",
            reattached=reattached,
        )

    async def _forward(
        self, spec: SandboxSpec, driver: DriverClient, forwards: Mapping[int, Dialer] | None
    ) -> None:
        if forwards and not self.provider.shares_loopback(spec):
            await driver.forward(forwards)

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


def _described(provider: str, isolation: str, kernel: object) -> str:
    return f"provider {provider} and isolation {isolation}" + (f" and kernel {kernel}" if kernel else "")


async def open_ahead(factories: Mapping[str, SandboxFactory]) -> None:
    """Open sandboxes ahead of the kind that most tasks of each suite need first."""
    for factory in factories.values():
        specs = Counter(factory.first_spec(task) for task in factory.suite.tasks.values())
        for spec, _ in specs.most_common(1):
            await factory.expect(spec)
