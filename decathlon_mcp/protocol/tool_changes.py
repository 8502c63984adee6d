"""`tools/list_changed` in sessions: whose list of tools has changed."""

from __future__ import annotations

from mcp.server.connection import Connection

from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.protocol.sdk import notify_tools_changed
from decathlon_mcp.types import JsonObject, as_object

CURRENT_KEY = "decathlon/current"
"""Key in a lobby connection's state of the access to the episode that it started last."""
_LISTENER_KEY = "decathlon/tool_listener"


class SessionListener:
    """Notifies the client of a session when the tools that it lists have changed."""

    # Episodes have weak references to it: it lives as long as the connection, which keeps it in its state.

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def tools_changed(self, episode: Episode) -> None:
        """Send the notification, unless the session lists the tools of another episode by now."""
        current: EpisodeAccess | None = self._connection.state.get(CURRENT_KEY)
        if current is None or current.episode is episode:
            await notify_tools_changed(self._connection)


def listen_for_changes(connection: Connection | None, episode: Episode) -> None:
    """From now on the session, if there is one, is notified of changes of the episode's tools."""
    if connection is None:
        return
    listener = connection.state.get(_LISTENER_KEY)
    if listener is None:
        listener = connection.state[_LISTENER_KEY] = SessionListener(connection)
    episode.tool_listeners.add(listener)


def with_changing_tools(result: JsonObject) -> JsonObject:
    """The result of `initialize`, with the capability to announce changed tools."""
    # The SDK's server has no option for it.
    capabilities = {**(as_object(result.get("capabilities")) or {}), "tools": {"listChanged": True}}
    return {**result, "capabilities": capabilities}
