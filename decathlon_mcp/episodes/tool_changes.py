"""Tools that a task's server changes while an episode is played.

A client with a session is notified and gets the new list when it asks; both lists can be called. The list
that the episode gave first stays for everybody else: MCP 2026-07-28 has no list that changes by itself.
"""

from __future__ import annotations

import logging

import anyio

from decathlon_mcp.driver_client.driver import DriverClient
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.errors import (
    CallTimeoutError,
    DriverError,
    LimitExceededError,
    SandboxLostError,
    SetUpError,
)
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.episodes")

MIN_INTERVAL_SECONDS = 1.0
"""A server's tools are listed again at most this often, however often it says that they have changed."""
MAX_CHANGES = 100
"""Changes of one episode's tools. An agent may control a server, and every change is stored."""
LIST_SECONDS = 30.0
"""Time limit for a server's answer."""
NOTIFY_SECONDS = 5.0
"""How long one client may keep the others waiting."""


async def follow_tool_changes(episode: Episode, driver: DriverClient) -> None:
    """List the tools of servers again that say that these have changed, until cancelled."""
    changes = 0
    while changes < MAX_CHANGES:
        names = await driver.changed_servers()
        known = () if episode.tools is None else episode.tools.servers
        for server in names.intersection(known):
            if await _refresh(episode, driver, server):
                changes += 1
                await _notify(episode)
        await anyio.sleep(MIN_INTERVAL_SECONDS)
    log.warning("the tools of an episode change too often", extra=fields(episode=episode.spec.label))


async def _refresh(episode: Episode, driver: DriverClient, server: str) -> bool:
    """List a server's tools again; whether they are others than before."""
    try:
        tools = await driver.list_tools(server, timeout_seconds=LIST_SECONDS)
        return episode.change_tools(server, tools)
    except SandboxLostError:
        return False
    except (DriverError, CallTimeoutError, LimitExceededError, SetUpError) as error:
        # The episode goes on with the tools that it has.
        log.warning(
            "the changed tools of a server cannot be listed",
            extra=fields(episode=episode.spec.label, server=server, why=error.message),
        )
        return False


async def _notify(episode: Episode) -> None:
    for listener in list(episode.tool_listeners):
        with anyio.move_on_after(NOTIFY_SECONDS):
            await listener.tools_changed(episode)
