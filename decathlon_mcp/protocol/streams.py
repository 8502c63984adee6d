"""MCP over a pair of streams: stdin and stdout of this process, or a client's in the same process."""

from __future__ import annotations

from typing import Any

from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared._stream_protocols import ReadStream, WriteStream
from mcp.shared.message import SessionMessage

from decathlon_mcp.episodes.access import Principal
from decathlon_mcp.episodes.episode import EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.protocol.episode_server import EpisodeServer
from decathlon_mcp.protocol.lobby import Lobby
from decathlon_mcp.protocol.resolvers import FixedResolver


async def serve_streams(
    episodes: EpisodeRegistry,
    read: ReadStream[SessionMessage | Exception],
    write: WriteStream[SessionMessage],
    *,
    task: str | None = None,
    episode: str | None = None,
) -> None:
    """The lobby until the streams end; with `task`, an episode of it, which ends with them; with `episode`,
    the one that has this handle or agent's id, which does not.

    Raises UnknownTaskError, NotRunnableError, AtCapacityError, UnknownEpisodeError at once.
    """
    if episode is not None:
        await _run_episode(episodes.access(episode, Principal()), read, write)
        return
    if task is None:
        await _run(Lobby(episodes).server, read, write)
        return
    started = episodes.start(task, Principal())
    try:
        await _run_episode(EpisodeAccess.by_session(started, Principal()), read, write)
    finally:
        started.close()


async def serve_stdio(episodes: EpisodeRegistry, *, task: str | None = None) -> None:
    """`serve_pipe` over this process's stdin and stdout."""
    async with stdio_server() as (read, write):
        await serve_streams(episodes, read, write, task=task)


async def _run_episode(
    access: EpisodeAccess,
    read: ReadStream[SessionMessage | Exception],
    write: WriteStream[SessionMessage],
) -> None:
    with access.episode.hold():
        await _run(EpisodeServer(FixedResolver(access)).server, read, write)


async def _run(
    server: Server[Any], read: ReadStream[SessionMessage | Exception], write: WriteStream[SessionMessage]
) -> None:
    await server.run(read, write, server.create_initialization_options())
