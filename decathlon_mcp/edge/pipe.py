"""MCP over a pair of streams: stdin and stdout of this process, or a client's in the same process."""

from __future__ import annotations

from typing import Any

from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared._stream_protocols import ReadStream, WriteStream
from mcp.shared.message import SessionMessage

from decathlon_mcp.edge.episode_server import EpisodeServer
from decathlon_mcp.edge.lobby import Lobby
from decathlon_mcp.edge.ways import PipeWay
from decathlon_mcp.episodes import Caller, Episodes


async def serve_pipe(
    episodes: Episodes,
    read: ReadStream[SessionMessage | Exception],
    write: WriteStream[SessionMessage],
    *,
    task: str | None = None,
) -> None:
    """The lobby or, with `task`, an episode of it, until the streams end; the episode ends with them.

    Raises UnknownTaskError, NotRunnableError, AtCapacityError at once.
    """
    if task is None:
        await _run(Lobby(episodes).server, read, write)
        return
    episode = episodes.start(task, Caller())
    try:
        with episode.hold():
            await _run(EpisodeServer(PipeWay(episode), episodes.settings.reward).server, read, write)
    finally:
        episode.close()


async def serve_stdio(episodes: Episodes, *, task: str | None = None) -> None:
    """`serve_pipe` over this process's stdin and stdout."""
    async with stdio_server() as (read, write):
        await serve_pipe(episodes, read, write, task=task)


async def _run(
    server: Server[Any], read: ReadStream[SessionMessage | Exception], write: WriteStream[SessionMessage]
) -> None:
    await server.run(read, write, server.create_initialization_options())
