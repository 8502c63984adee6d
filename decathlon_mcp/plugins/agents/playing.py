"""Serving one episode on a socket of its own: its tools, and no other address."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from decathlon_mcp.background import background_tasks, run_for_ever
from decathlon_mcp.http.protocol import ConnectionLimits, Connections
from decathlon_mcp.http.server import Server

PATH = "/mcp"


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
