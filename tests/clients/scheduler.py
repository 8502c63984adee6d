"""Stands in for Ray Serve's proxy: passes each request to one of the nodes, whose servers are real.

tests/ray/three_nodes.py plays on a real Ray cluster.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from decathlon_mcp.background import background_tasks
from decathlon_mcp.http.listening import listen
from decathlon_mcp.http.server import serve_http
from decathlon_mcp.plugins.cluster.node import Node


class LostError(Exception):
    """The scheduler's connection to a node broke."""


class SchedulerNode:
    """A node as the scheduler has it. `starts`: the requests that it got."""

    def __init__(self, url: str, scheduler: Scheduler) -> None:
        self.url = url
        self.node = Node(url, scheduler.list_nodes)
        self.starts = 0
        self._frozen = anyio.Event()
        self._scopes: set[anyio.CancelScope] = set()

    def lose(self) -> None:
        """Break all responses off."""
        for scope in self._scopes:
            scope.cancel()

    def freeze(self) -> None:
        """Let all responses stay as they are, open."""
        self._frozen.set()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unless_frozen(message: Message) -> None:
            if self._frozen.is_set():
                await anyio.sleep_forever()
            await send(message)

        with anyio.CancelScope() as cancel_scope:
            self._scopes.add(cancel_scope)
            try:
                response = await self.node.answer(Request(scope, receive))
                await response(scope, receive, send_unless_frozen)
            finally:
                self._scopes.discard(cancel_scope)
        if cancel_scope.cancelled_caught:
            raise LostError


class Scheduler:
    """Nodes in turns. `statuses`: the first is the answer to the next request instead."""

    def __init__(self) -> None:
        self.nodes: list[SchedulerNode] = []
        self.statuses: list[int] = []
        self._next = 0

    async def list_nodes(self) -> list[str]:
        return [node.url for node in self.nodes]

    def remove(self, node: SchedulerNode) -> None:
        """The node is lost, and gets no further request."""
        self.nodes.remove(node)
        node.lose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.statuses:
            await PlainTextResponse("no", self.statuses.pop(0))(scope, receive, send)
            return
        node = self.nodes[self._next % len(self.nodes)]
        if scope["path"] == "/episodes":
            self._next += 1
            node.starts += 1
        await node.serve(scope, receive, send)


@asynccontextmanager
async def scheduling(*urls: str) -> AsyncGenerator[tuple[Scheduler, str]]:
    """A cluster of the servers at these URLs, and its own URL."""
    scheduler = Scheduler()
    scheduler.nodes = [SchedulerNode(url, scheduler) for url in urls]
    nodes = list(scheduler.nodes)
    listener = listen("127.0.0.1", 0)
    async with background_tasks() as tasks:
        ready, stop, stopped = anyio.Event(), anyio.Event(), anyio.Event()

        async def serve() -> None:
            app = Starlette(routes=[Route("/{path:path}", scheduler)])
            await serve_http(app, listener, drain=anyio.lowlevel.checkpoint, on_ready=ready.set, stop=stop)
            stopped.set()

        tasks.start_soon(serve)
        await ready.wait()
        try:
            yield scheduler, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            with anyio.CancelScope(shield=True):
                for node in nodes:
                    node.lose()
                    await node.node.aclose()
                await stopped.wait()
