"""A server in this process: no port, no HTTP; the lobby and each episode over in-memory streams.

The only part of this package that knows the server's, and that only once it is run: it needs
`decathlon-mcp[server]`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
from mcp.shared.memory import create_client_server_memory_streams

from decathlon_client.connection import Connection
from decathlon_client.errors import error_from_code
from decathlon_client.sdk import Session

if TYPE_CHECKING:
    from decathlon_mcp.episodes.registry import EpisodeRegistry

CLOSE_SECONDS = 5.0


class EmbeddedServer:
    """`settings` are those of the server, by the names of `decathlon_mcp.settings.Settings`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._episodes: EpisodeRegistry | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        from decathlon_mcp.app import bootstrap
        from decathlon_mcp.errors import DecathlonError
        from decathlon_mcp.settings import Settings

        settings = Settings.model_validate(dict(self._settings))
        try:
            async with bootstrap(settings) as self._episodes:
                yield
        except DecathlonError as error:
            raise error_from_code(error.code, error.message, error.data) from error

    def where(self, episode: str | None) -> str:
        return "the lobby in this process" if episode is None else f"episode {episode[:12]} in this process"

    @asynccontextmanager
    async def dial(self, connection: Connection, episode: str | None) -> AsyncGenerator[Session]:
        from decathlon_mcp.errors import DecathlonError
        from decathlon_mcp.protocol.streams import serve_streams

        assert self._episodes is not None, "dialled before it runs"
        episodes, ended = self._episodes, anyio.Event()
        async with create_client_server_memory_streams() as ((read, write), server):

            async def serve() -> None:
                try:
                    await serve_streams(episodes, *server, episode=episode)
                except DecathlonError as error:
                    connection.lose(error_from_code(error.code, error.message, error.data))
                finally:
                    ended.set()
                    await server[1].aclose()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                async with Session(read, write) as session:
                    yield session
                await write.aclose()
                with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                    await ended.wait()
                tasks.cancel_scope.cancel()
