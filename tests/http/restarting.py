"""Servers that end and are started again on the same socket and store."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anyio
import httpx2
from anyio.abc import TaskGroup
from starlette.types import Receive, Scope, Send

from decathlon_mcp.background import background_tasks
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.http.listening import listen
from decathlon_mcp.http.server import serve_http
from decathlon_mcp.storage.store import Store
from tests.episodes.environment import TOOLS, running_registry
from tests.fakes.provider import FakeProvider
from tests.http.messages import ACCEPT, INITIALIZE, TASK
from tests.probe.serving import Served

SERVER = "server"
"""Name of the servers in the store."""


@dataclass
class Restartable:
    """A registry over the fake provider whose HTTP server can be replaced by another of the next generation.

    The episodes go on meanwhile, as those of a server that takes its sandboxes back.
    """

    registry: EpisodeRegistry
    folder: Path
    listener: socket.socket
    tasks: TaskGroup
    store: Store
    tokens: Tokens | None = None

    def __post_init__(self) -> None:
        self._over: set[anyio.Event] = set()

    @property
    def served(self) -> Served:
        return Served(f"http://127.0.0.1:{self.listener.getsockname()[1]}", self.registry, self.folder)

    async def start(self) -> None:
        self._ended, self._stop, self._stopped = (anyio.Event() for _ in range(3))
        self.registry.shutdown.handing_over = False
        self.registry.shutdown.drained = anyio.Event()
        self.store.generation += 1
        app, running, ready = http_app(self.registry, tokens=self.tokens), anyio.Event(), anyio.Event()

        async def live() -> None:
            async with app.running():
                running.set()
                await self._ended.wait()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            """The application without its lifespan."""
            if scope["type"] == "lifespan":
                for event in ("startup", "shutdown"):
                    await receive()
                    await send({"type": f"lifespan.{event}.complete"})
            else:
                await self.serve_until_left(lambda: app(scope, receive, send))

        async def drain() -> None:
            self.registry.shutdown.drained.set()

        async def serve() -> None:
            await serve_http(
                cast("Any", answer),
                self.listener.dup(),
                drain=drain,
                on_ready=ready.set,
                stop=self._stop,
                events=self.registry.events,
            )
            self._stopped.set()

        self.tasks.start_soon(live)
        await running.wait()
        self.tasks.start_soon(serve)
        await ready.wait()

    async def serve_until_left(self, run: Callable[[], Awaitable[None]]) -> None:
        """Serve a request until it is answered, or the server leaves it as one that is killed would.

        In a task of its own, because uvicorn cancels the requests that remain when it ends.
        """
        over = anyio.Event()

        async def serve() -> None:
            try:
                await run()
            except Exception:
                logging.getLogger(__name__).exception("a request failed")
            finally:
                over.set()

        self._over.add(over)
        self.tasks.start_soon(serve)
        await over.wait()
        self._over.discard(over)

    async def stop(self, *, leaving_calls: bool = False) -> None:
        """End the server; its sessions stay in the store.

        `leaving_calls`: its calls in flight go on, as in the sandbox of a server that was killed.
        """
        self.registry.shutdown.handing_over = True
        if leaving_calls:
            for request in self._over:
                request.set()
        else:
            self._ended.set()
        self._stop.set()
        await self._stopped.wait()

    async def restart(self, *, leaving_calls: bool = False) -> None:
        await self.stop(leaving_calls=leaving_calls)
        await self.start()


@asynccontextmanager
async def restartable(
    tmp_path: Path,
    provider: FakeProvider | None = None,
    *,
    tokens: Tokens | None = None,
    **settings: Any,
) -> AsyncGenerator[Restartable]:
    """A server over the fake provider that can be restarted."""
    provider = provider or FakeProvider(tools=TOOLS)
    folder = tmp_path / "store"
    folder.mkdir()
    with listen("127.0.0.1", 0) as listener, Store.open(folder, SERVER) as store:
        async with running_registry(tmp_path, provider, **settings) as registry, background_tasks() as tasks:
            registry.store = store
            server = Restartable(registry, folder, listener, tasks, store, tokens)
            await server.start()
            try:
                yield server
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(20):
                    await server.stop()


@dataclass
class RawSession:
    """A session over plain HTTP, with the headers that an SDK's client would send."""

    http: httpx2.AsyncClient
    url: str
    headers: dict[str, str]

    @classmethod
    async def open(
        cls, http: httpx2.AsyncClient, url: str, *, version: str = "2025-11-25", **headers: str
    ) -> RawSession:
        params = {**INITIALIZE["params"], "protocolVersion": version}
        all_headers = {**ACCEPT, **headers}
        response = await http.post(url, json={**INITIALIZE, "params": params}, headers=all_headers)
        assert response.status_code == 200, response.text
        session_id = response.headers["mcp-session-id"]
        session_headers = {"mcp-session-id": session_id, "mcp-protocol-version": version}
        session = cls(http, url, {**all_headers, **session_headers})
        await session.notify("notifications/initialized")
        return session

    @property
    def id(self) -> str:
        return self.headers["mcp-session-id"]

    async def notify(self, method: str, **params: Any) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        assert (await self.http.post(self.url, json=message, headers=self.headers)).status_code == 202

    async def cancel(self, request_id: Any, **params: Any) -> None:
        await self.notify("notifications/cancelled", requestId=request_id, **params)

    async def post(self, method: str, params: Mapping[str, Any] | None = None, *, request_id: Any = 7) -> Any:
        message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params or {}}
        return await self.http.post(self.url, json=message, headers=self.headers)

    async def ask(self, method: str, params: Mapping[str, Any] | None = None, *, request_id: Any = 7) -> Any:
        """Send a request and return its answer."""
        response = await self.post(method, params, request_id=request_id)
        assert response.status_code == 200, response.text
        return answer_of(response)

    async def call(self, tool: str, *, request_id: Any = 7, **arguments: Any) -> Any:
        """Call a tool and return the text of its result."""
        params = {"name": tool, "arguments": arguments}
        reply = await self.ask("tools/call", params, request_id=request_id)
        return reply["result"]["content"][0]["text"]

    @asynccontextmanager
    async def calling(
        self, tool: str, *, request_id: Any = 7, **arguments: Any
    ) -> AsyncGenerator[tuple[AsyncIterator[str], list[str]]]:
        """Call a tool, past the first event. Gives the lines to come, and those of the first event."""
        params = {"name": tool, "arguments": arguments}
        async with self.asking("tools/call", params, request_id=request_id) as (coming, lines):
            yield coming, lines

    @asynccontextmanager
    async def asking(
        self, method: str, params: Mapping[str, Any], *, request_id: Any = 7
    ) -> AsyncGenerator[tuple[AsyncIterator[str], list[str]]]:
        """As `calling`, for any request."""
        message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
        async with self.http.stream("POST", self.url, json=message, headers=self.headers) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            coming = aiter(response.aiter_lines())
            lines: list[str] = []
            while line := await anext(coming):
                lines.append(line)
            yield coming, lines

    @asynccontextmanager
    async def resuming(self, event_id: str) -> AsyncGenerator[AsyncIterator[str]]:
        """GET what follows an event. Gives the lines, once the response has begun."""
        headers = {**self.headers, "Accept": "text/event-stream", "last-event-id": event_id}
        async with self.http.stream("GET", self.url, headers=headers) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            yield aiter(response.aiter_lines())

    async def resume(self, event_id: str) -> Any:
        """GET what follows an event."""
        headers = {**self.headers, "Accept": "text/event-stream", "last-event-id": event_id}
        return await self.http.get(self.url, headers=headers)


async def ready_session(http: httpx2.AsyncClient, served: Served, **options: Any) -> RawSession:
    """A session at a task's address whose episode is ready."""
    session = await RawSession.open(http, served.task(TASK), **options)
    await session.ask("tools/list", request_id=1)
    return session


def events_of(response: Any) -> list[dict[str, str]]:
    """The events of a response."""
    blocks = response.text.replace("\r\n", "\n").split("\n\n")
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks if block.strip()]


def answer_of(response: Any) -> Any:
    """The JSON-RPC answer in a response, which is JSON or events."""
    if response.headers["content-type"].startswith("application/json"):
        return response.json()
    return next(
        message
        for event in events_of(response)
        if event.get("data") and "id" in (message := json.loads(event["data"]))
    )
