"""A server in this process: no port, no HTTP; the lobby and each episode over in-memory streams.

The only module of this package that imports the server, and only once it runs: it requires
`decathlon-mcp[server]`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
from mcp.shared.memory import create_client_server_memory_streams
from mcp.shared.message import SessionMessage

from decathlon_client.errors import ClientError, error_from_code
from decathlon_client.sdk import Session
from decathlon_client.session import SessionOwner

if TYPE_CHECKING:
    from decathlon_mcp.episodes.registry import EpisodeRegistry

CLOSE_SECONDS = 5.0
"""How long the server may take to end a session, and with it perhaps an episode."""
MISSING_SERVER = (
    "this runs the server in this process, but only the client is installed; to add the server, in the "
    "clone: pip install '.[server,starter]'; where its packages do not fit beside a trainer's, install it in "
    "an environment of its own and name its program: ToolDecathlonEnv(server='server/bin/decathlon-mcp')"
)


class EmbeddedEndpoint:
    """A server in this process. `settings` are the fields of `decathlon_mcp.settings.Settings`, by name."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._registry: EpisodeRegistry | None = None

    @property
    def registry(self) -> EpisodeRegistry:
        """The server; only while it runs."""
        assert self._registry is not None, "the embedded server is not running"
        return self._registry

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        # mcp 1.x next to the server's other packages fails with an ImportError that is not about a module.
        try:
            from decathlon_mcp.app import bootstrap
            from decathlon_mcp.errors import DecathlonError
            from decathlon_mcp.settings import read_settings
        except ImportError as error:
            raise ClientError(f"{MISSING_SERVER} ({error})", code="server_not_installed") from error

        try:
            async with bootstrap(read_settings(self._settings)) as self._registry:
                yield
        except DecathlonError as error:
            raise error_from_code(error.code, error.message, error.data) from error

    def address(self, episode: str | None) -> str:
        return "the lobby in this process" if episode is None else "an episode in this process"

    @asynccontextmanager
    async def open_session(self, owner: SessionOwner, episode: str | None) -> AsyncGenerator[Session]:
        from decathlon_mcp.errors import DecathlonError
        from decathlon_mcp.protocol.stdio import serve_lines

        registry, ended = self.registry, anyio.Event()
        async with create_client_server_memory_streams() as ((read, write), server_streams):

            async def serve() -> None:
                received, sent = server_streams
                try:
                    await serve_lines(registry, lines_of(received), line_writer(sent), episode=episode)
                except DecathlonError as error:
                    owner.lose(error_from_code(error.code, error.message, error.data))
                finally:
                    ended.set()
                    await sent.aclose()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                async with Session(read, write) as session:
                    yield session
                # The closed stream ends the server's side, which may still have to close an episode.
                await write.aclose()
                with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                    await ended.wait()
                tasks.cancel_scope.cancel()


async def lines_of(received: Any) -> AsyncGenerator[bytes]:
    """The messages of one of the SDK's streams as lines of JSON."""
    async for item in received:
        if not isinstance(item, Exception):
            yield item.message.model_dump_json(by_alias=True, exclude_unset=True).encode()


def line_writer(sent: Any) -> Callable[[bytes], Awaitable[None]]:
    """A function that sends lines of JSON on one of the SDK's streams. It raises OSError on a closed one."""
    # mcp 1.x has no such package; but the server, which is here, requires 2.0.
    from mcp_types.jsonrpc import jsonrpc_message_adapter

    async def write(line: bytes) -> None:
        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        try:
            await sent.send(SessionMessage(message))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise OSError("the session has ended") from error

    return write
