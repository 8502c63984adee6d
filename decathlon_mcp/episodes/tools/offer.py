"""The choice of an episode's tools, and of the servers that start at set-up.

If the cache has the task's list, the episode offers the list from its first moment, in the queue too, and
set-up starts only the servers that have to run. The list stays the episode's once a client has it. A server
with other tools, when it starts or later, is a note in the trajectory. If a server starts with other tools
than the cache has, the cache forgets the list, and the next episode starts its servers at set-up again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import PurePosixPath

from decathlon_mcp.driver.client import DriverClient, ServerInfo
from decathlon_mcp.driver.replies import OVERLONG_FOLDER, Truncation
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.tools.offered import OfferedTools, offered_tools, same_tools
from decathlon_mcp.episodes.tools.tool_session import ServerStarts, ToolSession
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.storage.kept_tools import KeptTools
from decathlon_mcp.suites.prompts import LOCAL
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, as_json

log = logging.getLogger("decathlon.episodes")
MAX_CHANGES = 100
"""Notes about changed tools in one episode: an agent may control a server."""


class ToolOffer:
    """The tools of one episode. For its runner. `turn`: as for `ServerStarts`."""

    def __init__(
        self, episode: Episode, kept_tools: KeptTools, turn: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        self._episode = episode
        self._kept_tools = kept_tools
        self._turn = turn
        self._factory = episode.sandbox_factory
        self._task = episode.spec.task
        self._lists = self._factory.tool_lists
        self._key: str | None = None
        """Where the lists of this sandbox are cached; None if they are not."""
        self._known: OfferedTools | None = None
        """What the cache has under the key."""
        self._changes: list[tuple[str, int]] = []
        """The servers whose tools have changed, each with the number of calls that were sent before."""

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
            self._key, self._known = key, await self._lists.find(key, root)
            if self._known is not None:
                self._list(self._known)

    async def servers_to_start(self, sandbox: Sandbox) -> Collection[str]:
        """The servers that start at set-up: all, unless their tools are known."""
        if self._lists is None:
            return self._task.needs.servers
        revision = self._episode.records.progress.facts.suite_revision
        assert revision, "the set-up notes the revision before it opens a sandbox"
        key = await self._lists.key(self._task, revision, sandbox.image_digest)
        if not self._is_lazy or key is None:
            self._known = None
        elif self._known is None or self._key != key:
            self._known = await self._lists.find(key, sandbox.root)
        self._key = key
        return self._task.needs.servers if self._known is None else self._task.eager_servers

    async def complete(
        self, sandbox: Sandbox, driver: DriverClient, servers: Mapping[str, ServerInfo]
    ) -> str:
        """Offer the tools of a sandbox that is set up, unless the episode offers some already.

        `servers`: what each server reported that the set-up has started.

        Returns the digest by which `KeptTools` has them. Caches the lists of servers that were started.
        Raises SetUpError if the suite's local tools cannot be described, or two tools have the same name.
        """
        tools = self._known
        if tools is None:
            tools = await self._find_tools(sandbox, driver, servers)
            if self._lists is not None and self._key is not None:
                # No tool has been called in this sandbox yet.
                await self._lists.keep(self._key, tools, sandbox.root)
        offered, digest = await self._offer(tools)
        if self._known is not None or tools is not offered:
            for name, info in servers.items():
                await self._compare(sandbox.root, name, info)
        if offered.local:
            server = self._factory.suite_hooks.local_server(offered.local, sandbox.root)
            await driver.define([] if server is None else [server])
        return digest

    async def copy(self, tools: JsonObject) -> str:
        """Offer these tools of another episode, from whose sandbox this episode's was copied.

        Unless the episode offers some already. Returns what `complete` returns.
        """
        _, digest = await self._offer(offered_tools(as_json(tools), self._factory.tool_names))
        return digest

    async def _offer(self, tools: OfferedTools) -> tuple[OfferedTools, str]:
        tools = self._episode.tools.offered or tools
        # Before the offer: who waits for the tools expects to find the episode ready.
        digest = await self._kept_tools.keep(tools, tools.tools)
        self._list(tools)
        return tools, digest

    async def tool_session(
        self, sandbox: Sandbox, driver: DriverClient, *, running: Collection[str] = ()
    ) -> ToolSession:
        """The session that calls the offered tools. `running`: the servers that are known to run."""
        episode, facts = self._episode, self._episode.records.progress.facts
        assert episode.tools.offered is not None
        if self._key is None and self._lists is not None:
            # Taken back from a dead server.
            self._key = await self._lists.key(self._task, facts.suite_revision, facts.image_digest)
        driver.on_tools_changed = self._note_change
        driver.clock.on_absent = episode.calls.on_absent
        starts = ServerStarts(
            driver,
            start_seconds=episode.spec.limits.servers_seconds,
            running=running,
            optional=[LOCAL] if episode.tools.offered.local else [],
            report=partial(self._compare, sandbox.root),
            turn=self._turn,
        )
        truncation, profile = None, self._factory.suite.profile
        if profile.cuts_overlong:
            folder = sandbox.root / profile.workspace / OVERLONG_FOLDER
            truncation = Truncation(profile.overlong_characters, folder if profile.saves_overlong else None)
        return ToolSession(driver, starts, truncation, self._factory.suite_hooks.call_filter(facts))

    async def _compare(self, root: PurePosixPath, name: str, info: ServerInfo | None) -> None:
        """Compare the tools of a server that has started with the offered tools. `info`: see `Report`.

        An agent may have changed them, which costs the next episode a set-up that starts all servers.
        """
        offered = self._episode.tools.offered
        if offered is None or (info is not None and same_tools(info.tools, offered.servers.get(name, []))):
            return
        if info is not None:
            self._note_change(name, "has other tools than were listed before")
        log.warning(
            "a server does not have the tools that its episode offers",
            extra=fields(episode=self._episode.public_id, task=self._episode.spec.task_name, server=name),
        )
        if self._lists is not None and self._key is not None:
            await self._lists.forget(self._key, offered, root)

    def _list(self, tools: OfferedTools) -> None:
        """List these tools from now on to the end, unless the episode lists some already."""
        if self._episode.tools.offered is None:
            self._episode.note(tools=tools.to_json())
            self._episode.tools.offer(tools)

    def _note_change(self, server: str, what: str = "announces that its tools have changed") -> None:
        offered, change = self._episode.tools.offered, (server, self._episode.calls.sent)
        if offered is None or server not in offered.servers or len(self._changes) >= MAX_CHANGES:
            return
        if change not in self._changes[-1:]:
            self._changes.append(change)
            text = f"the server {server} {what}; this episode's list stays as it is"
            self._episode.trajectory.add("note", calls=change[1], role="server", text=text)

    async def _find_tools(
        self, sandbox: Sandbox, driver: DriverClient, servers: Mapping[str, ServerInfo]
    ) -> OfferedTools:
        """The tools of the task's servers and the suite's local tools."""
        factory, seconds = self._factory, self._episode.spec.limits.servers_seconds
        local = await factory.suite_hooks.describe_local_tools(
            self._task, driver, root=sandbox.root, timeout_seconds=seconds
        )
        tools: dict[str, list[JsonObject]] = {name: server.tools for name, server in servers.items()}
        if local:
            tools[LOCAL] = [tool for tools in local.values() for tool in tools]
        return offered_tools(as_json({"servers": tools, "local": local}), factory.tool_names)
