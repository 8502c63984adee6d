"""Which tools an episode offers, which of its servers start at set-up, and the tools that servers change.

If the cache has the task's tool list, the episode offers it from its first moment, in the queue too, and only
those servers start at set-up that have to. A list that was given to a client stays the episode's.

A task's server may change its tools while the episode is played. A client with a session is notified and gets
the new list when it asks; both lists can be called. The list that the episode gave first stays for everybody
else: MCP 2026-07-28 has no list that changes by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import PurePosixPath

import anyio

from decathlon_mcp.driver_client.driver import DriverClient, ServerInfo
from decathlon_mcp.driver_client.replies import OVERLONG_FOLDER, Cut
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.set_up import PreparedTask
from decathlon_mcp.episodes.tools.cache import KnownTools
from decathlon_mcp.episodes.tools.offered import OfferedTools, same_tools, shared_router
from decathlon_mcp.episodes.tools.session import ServerStarts, ToolSession
from decathlon_mcp.errors import (
    CallTimeoutError,
    DriverError,
    LimitExceededError,
    SandboxLostError,
    SetUpError,
)
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.storage.kept_tools import KeptTools
from decathlon_mcp.suites.local_tools import local_spec
from decathlon_mcp.suites.tool_names import LOCAL
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

log = logging.getLogger("decathlon.episodes")
MIN_INTERVAL_SECONDS = 1.0
"""A server's tools are listed again at most this often, however often it says that they have changed."""
MAX_CHANGES = 100
"""Changes of one episode's tools. An agent may control a server, and every change is stored."""
LIST_SECONDS = 30.0
"""Time limit for a server's answer."""
NOTIFY_SECONDS = 5.0
"""How long one client may keep the others waiting."""


class ToolOffer:
    """The tools of one episode. For its runner. `turn`: as for `ServerStarts`."""

    def __init__(self, episode: Episode, turn: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._episode = episode
        self._turn = turn
        self._factory = episode.sandbox_factory
        self._task = episode.spec.task
        self._lists = self._factory.tool_lists
        self._key: str | None = None
        """Where the lists of this sandbox are kept; None if the cache is not used."""
        self._known: KnownTools | None = None
        """What the cache has for this sandbox."""

    @property
    def _is_lazy(self) -> bool:
        # An evaluator that inspects the agent's sandbox may look for what the servers did at their start.
        return self._factory.servers != "eager" and not self._task.in_place

    async def offer_early(self) -> None:
        """Offer the cached tools before the episode has a sandbox, unless it offers some already."""
        if self._lists is None or not self._is_lazy or self._episode.tools.offered is not None:
            return
        if (key := await self._lists.expected_key(self._task)) is not None:
            root = self._factory.agent_root(self._episode.public_id)
            if (known := await self._lists.find(key, root)) is not None:
                self._known = known
                self._episode.tools.offer(known.tools, known.router)

    async def servers_to_start(self, sandbox: Sandbox) -> Collection[str]:
        """The servers that start at set-up: all, unless their tools are known."""
        if self._lists is None:
            return self._task.needs.servers
        revision = self._episode.records.progress.suite_revision
        assert revision is not None, "the set-up notes the revision before it opens a sandbox"
        self._key = await self._lists.key(self._task, revision, sandbox.image_digest)
        if not self._is_lazy or self._key is None:
            self._known = None
        elif self._known is None or self._known.key != self._key:
            self._known = await self._lists.find(self._key, sandbox.root)
        return self._task.needs.servers if self._known is None else self._task.eager_servers

    async def complete(self, prepared: PreparedTask, kept_tools: KeptTools) -> str:
        """Offer the tools of a sandbox that is set up, unless the episode offers some already.

        Returns the digest by which `kept_tools` has them. Writes the lists of servers that were started, and
        compares them with the cached ones. Raises SetUpError if the suite's local tools cannot be described,
        or two tools have the same name.
        """
        sandbox, episode = prepared.sandbox, self._episode
        if self._known is None:
            tools = await self._find_tools(sandbox, prepared.driver, prepared.servers)
            if self._lists is not None and self._key is not None:
                # No tool has been called in this sandbox yet.
                await self._lists.keep(self._key, tools, sandbox.root)
            router = shared_router(tools.servers, self._factory.tool_names)
        else:
            tools, router = self._known.tools, self._known.router
        router = episode.tools.router or router
        # Before the offer: who waits for the tools expects to find the episode ready.
        digest = await kept_tools.keep(router, router.tools)
        episode.tools.offer(tools, router)
        if self._known is not None:
            for name, info in prepared.servers.items():
                await self._check(self._key, self._known.tools, sandbox.root, name, info)
        assert episode.tools.offered is not None
        if episode.tools.offered.local:
            await prepared.driver.define(
                [local_spec(self._factory.suite.profile, episode.tools.offered.local, sandbox.root)]
            )
        return digest

    async def copy(self, tools: OfferedTools, kept_tools: KeptTools) -> str:
        """Offer these tools of another episode, of whose sandbox this one's is a copy.

        Unless the episode offers some already. Returns what `complete` returns.
        """
        router = self._episode.tools.router or shared_router(tools.servers, self._factory.tool_names)
        digest = await kept_tools.keep(router, router.tools)
        self._episode.tools.offer(tools, router)
        return digest

    async def tool_session(
        self, sandbox: Sandbox, driver: DriverClient, *, running: Collection[str] = ()
    ) -> ToolSession:
        """The session that calls the offered tools. `running`: the servers that are known to run."""
        episode = self._episode
        tools = episode.tools.offered
        assert tools is not None
        key, lists = self._key, self._lists
        if key is None and lists is not None:
            # Taken back from a dead server.
            progress = episode.records.progress
            key = await lists.key(self._task, progress.suite_revision or "", progress.image_digest)

        async def check(name: str, info: ServerInfo | None) -> None:
            await self._check(key, tools, sandbox.root, name, info)

        starts = ServerStarts(
            driver,
            start_seconds=episode.spec.limits.servers_seconds,
            running=running,
            optional=[LOCAL] if tools.local else [],
            report=check,
            turn=self._turn,
        )
        return ToolSession(
            driver,
            starts,
            cut=self._cut(sandbox.root),
            coerces=episode.records.progress.coerces_arguments,
        )

    def _cut(self, root: PurePosixPath) -> Cut | None:
        """How overlong replies are shortened in a sandbox with that root; None if they are not."""
        profile = self._factory.suite.profile
        if not self._factory.cuts_overlong:
            return None
        folder = root / profile.workspace / OVERLONG_FOLDER if profile.saves_overlong else None
        return Cut(profile.overlong_characters, folder)

    async def _check(
        self, key: str | None, tools: OfferedTools, root: PurePosixPath, name: str, info: ServerInfo | None
    ) -> None:
        """Delete the cached lists if a server that has started lists other tools. `info`: see `Report`.

        An agent may have caused that, which costs one set-up that starts all servers.
        """
        if self._lists is None or key is None:
            return
        expected = tools.servers.get(name, [])
        if info is not None and same_tools(info.tools, expected):
            return
        log.warning(
            "a server does not have the tools that were cached",
            extra=fields(episode=self._episode.public_id, task=self._episode.spec.task_name, server=name),
        )
        await self._lists.evict(key, tools, root)

    async def _find_tools(
        self, sandbox: Sandbox, driver: DriverClient, servers: Mapping[str, ServerInfo]
    ) -> OfferedTools:
        """The tools of the task's servers and the suite's local tools."""
        factory, seconds = self._factory, self._episode.spec.limits.servers_seconds
        local = await factory.local_tools.describe(
            factory.suite, self._task, driver, root=sandbox.root, timeout_seconds=seconds
        )
        offered: dict[str, list[JsonObject]] = {name: server.tools for name, server in servers.items()}
        if local:
            offered[LOCAL] = [tool for tools in local.values() for tool in tools]
        return OfferedTools(offered, local)


async def follow_tool_changes(episode: Episode, driver: DriverClient) -> None:
    """List the tools of servers again that say that these have changed, until cancelled."""
    changes = 0
    while changes < MAX_CHANGES:
        names = await driver.changed_servers()
        offered = episode.tools.offered
        listed_servers = () if offered is None else offered.servers
        for server in names.intersection(listed_servers):
            if await _refresh(episode, driver, server):
                changes += 1
                await _notify(episode)
        await anyio.sleep(MIN_INTERVAL_SECONDS)
    log.warning("the tools of an episode change too often", extra=fields(episode=episode.public_id))


async def _refresh(episode: Episode, driver: DriverClient, server: str) -> bool:
    """List a server's tools again; whether they are others than before."""
    try:
        tools = await driver.list_tools(server, timeout_seconds=LIST_SECONDS)
        return episode.tools.change(server, tools)
    except SandboxLostError:
        return False
    except (DriverError, CallTimeoutError, LimitExceededError, SetUpError) as error:
        # The episode goes on with the tools that it has.
        log.warning(
            "the changed tools of a server cannot be listed",
            extra=fields(episode=episode.public_id, server=server, why=error.message),
        )
        return False


async def _notify(episode: Episode) -> None:
    for listener in list(episode.tools.listeners):
        with anyio.move_on_after(NOTIFY_SECONDS):
            await listener.tools_changed(episode.tools)
