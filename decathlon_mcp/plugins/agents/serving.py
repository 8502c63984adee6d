"""The server in this process whose episodes agents play, and an episode of it on a socket of its own."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from decathlon_client import Decathlon
from decathlon_client.local_server import EmbeddedEndpoint
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from decathlon_mcp.background import background_tasks, run_for_ever
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.authentication import AllowedHosts
from decathlon_mcp.http.protocol import ConnectionLimits, Connections
from decathlon_mcp.http.server import Server
from decathlon_mcp.settings import Settings

WAIT_SECONDS = 60.0
"""How much longer than an attempt an episode lives without a request, so that a program that has stopped to
play is ended by its own time limit."""
PATH = "/mcp"


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """The episodes of an embedded server, its ASGI application, and the limits of its connections."""

    registry: EpisodeRegistry
    app: ASGIApp
    limits: ConnectionLimits


def with_longer_lives(settings: Settings, seconds: float) -> Settings:
    """Settings with which no episode ends before an attempt of that time, whatever its agent does."""
    names = ("idle_seconds", "first_use_seconds")
    return settings.model_copy(
        update={name: max(getattr(settings, name), seconds + WAIT_SECONDS) for name in names}
    )


@asynccontextmanager
async def embedded_server(
    d: Decathlon, settings: Settings, hosts: AllowedHosts | None = None
) -> AsyncGenerator[EmbeddedServer]:
    """The server of an open `Decathlon.embedded`."""
    endpoint = d._server  # pyright: ignore[reportPrivateUsage]
    assert isinstance(endpoint, EmbeddedEndpoint)
    max_body_bytes = settings.max_body_mib << 20
    app = http_app(endpoint.registry, hosts=hosts, max_body_bytes=max_body_bytes)
    limits = ConnectionLimits.for_bodies(max_body_bytes)
    async with app.running():
        yield EmbeddedServer(endpoint.registry, app, limits)


class PlayingApp:
    """ASGI application that serves one episode of another one at `path`, and 404 at every other path.

    `agent_id`: the id by which the episode can be played and not evaluated. With another path than the
    default, clients have to know it.
    """

    def __init__(self, app: ASGIApp, agent_id: str, path: str = PATH) -> None:
        self._app = app
        self._inner = f"/episodes/{agent_id}/mcp"
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != self._path:
            await PlainTextResponse(f"there is only {self._path} here\n", 404)(scope, receive, send)
            return
        inner = {**scope, "path": self._inner, "raw_path": self._inner.encode(), "query_string": b""}
        await self._app(inner, receive, send)


@asynccontextmanager
async def playing(app: ASGIApp, listener: socket.socket, limits: ConnectionLimits) -> AsyncGenerator[None]:
    """Serve on a listening socket, which is closed on exit with all its connections."""
    connections = Connections(limits)
    ready = anyio.Event()
    server = Server(app, connections, ready.set, lifespan=False)

    async def serve() -> None:
        # Never cancelled: it would leave its socket and connections to the event loop.
        with anyio.CancelScope(shield=True):
            await server.serve(sockets=[listener])

    async with background_tasks() as tasks:
        tasks.start_soon(run_for_ever, connections.sweep)
        tasks.start_soon(serve)
        try:
            await ready.wait()
            yield
        finally:
            server.should_exit = server.force_exit = True
