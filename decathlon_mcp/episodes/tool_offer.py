"""Which tools an episode offers, and which of its servers start at set-up.

If the cache has the task's tool list, the episode offers it from its first moment, in the queue too, and only
those servers start at set-up that have to. A list that was given to a client stays the episode's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import PurePosixPath

from decathlon_mcp.driver_client.driver import DriverClient, ServerInfo
from decathlon_mcp.driver_client.replies import Cut
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.records import OfferedTools
from decathlon_mcp.episodes.server_starts import ServerStarts
from decathlon_mcp.episodes.set_up import PreparedTask
from decathlon_mcp.episodes.tool_lists import KnownTools, same_tools, shared_router
from decathlon_mcp.episodes.tools import ToolSession
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.suites.local_tools import local_spec
from decathlon_mcp.suites.tool_names import LOCAL
from decathlon_mcp.suites.truncation import FOLDER
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

log = logging.getLogger("decathlon.episodes")


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
        if self._lists is None or not self._is_lazy or self._episode.tools is not None:
            return
        if (key := await self._lists.expected_key(self._task)) is not None:
            root = self._factory.root(f"{self._episode.spec.label}-agent")
            if (known := await self._lists.find(key, root)) is not None:
                self._known = known
                self._episode.offer(known.tools, known.router)

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

    async def complete(self, prepared: PreparedTask) -> OfferedTools:
        """Offer the tools of a sandbox that is set up, unless the episode offers some already.

        Writes the lists of servers that were started, and compares them with the cached ones. Raises
        SetUpError if the suite's local tools cannot be described, or two tools have the same name.
        """
        sandbox, episode = prepared.sandbox, self._episode
        if self._known is None:
            tools = await self._find_tools(sandbox, prepared.driver, prepared.servers)
            if self._lists is not None and self._key is not None:
                # No tool has been called in this sandbox yet.
                await self._lists.keep(self._key, tools, sandbox.root)
            if episode.tools is None:
                episode.offer(tools, shared_router(tools.servers, self._factory.tool_names))
        else:
            episode.offer(self._known.tools, self._known.router)
            for name, info in prepared.servers.items():
                await self._check(self._key, self._known.tools, sandbox.root, name, info)
        assert episode.tools is not None
        if episode.tools.local:
            await prepared.driver.define(
                [local_spec(self._factory.suite.profile, episode.tools.local, sandbox.root)]
            )
        return episode.tools

    async def tool_session(
        self, sandbox: Sandbox, driver: DriverClient, *, running: Collection[str] = ()
    ) -> ToolSession:
        """The session that calls the offered tools. `running`: the servers that are known to run."""
        episode = self._episode
        tools, router = episode.tools, episode.router
        assert tools is not None
        assert router is not None
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
        return ToolSession(driver, router, starts, cut=self._cut(sandbox.root))

    def _cut(self, root: PurePosixPath) -> Cut | None:
        """How overlong replies are shortened in a sandbox with that root; None if they are not."""
        profile = self._factory.suite.profile
        if not self._factory.cuts_overlong:
            return None
        folder = root / profile.workspace / FOLDER if profile.saves_overlong else None
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
            extra=fields(episode=self._episode.spec.label, task=self._episode.task_name, server=name),
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
