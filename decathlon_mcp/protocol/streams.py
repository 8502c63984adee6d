"""MCP over a pair of streams: this process's stdin and stdout, or an in-memory client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from decathlon_mcp.episodes.access import EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.protocol.episode_server import EpisodeServer, FixedResolver
from decathlon_mcp.protocol.lobby import Lobby
from decathlon_mcp.protocol.sdk import MessageReadStream, MessageWriteStream


async def serve_streams(
    registry: EpisodeRegistry,
    read: MessageReadStream,
    write: MessageWriteStream,
    *,
    task: str | None = None,
    episode: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> None:
    """Serve until the streams end.

    With `task`: a new episode of that task, closed when the streams end. With `episode`: the episode with
    this handle or agent id, left open. With neither: the lobby. `labels`: of each new episode. Raises
    UnknownTaskError, NotRunnableError, AtCapacityError, UnknownEpisodeError before anything is served.
    """
    if episode is not None:
        await _serve_episode(registry, registry.access(episode, Principal()), read, write)
        return
    if task is None:
        await _run(Lobby(registry, labels=labels).server, read, write)
        return
    started = registry.start(task, Principal(), labels=labels or {})
    try:
        await _serve_episode(registry, EpisodeAccess.by_session(started, Principal()), read, write)
    finally:
        started.close()


async def serve_stdio(
    registry: EpisodeRegistry, *, task: str | None = None, labels: Mapping[str, str] | None = None
) -> None:
    """`serve_streams` over this process's stdin and stdout."""
    async with stdio_server() as (read, write):
        await serve_streams(registry, read, write, task=task, labels=labels)


async def _serve_episode(
    registry: EpisodeRegistry, access: EpisodeAccess, read: MessageReadStream, write: MessageWriteStream
) -> None:
    with access.episode.lease.hold():
        await _run(EpisodeServer(FixedResolver(access), registry.spans).server, read, write)


async def _run(server: Server[Any], read: MessageReadStream, write: MessageWriteStream) -> None:
    await server.run(read, write, server.create_initialization_options())
