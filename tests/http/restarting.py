"""Servers that end and are started again on the same socket and store."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
from anyio.abc import Process, TaskGroup

from decathlon_mcp.background import background_tasks
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.http.server import listen, serve_http
from decathlon_mcp.storage.store import Store
from tests.episodes.environment import TOOLS, running_registry
from tests.fakes.provider import FakeProvider
from tests.http.messages import ACCEPT, INITIALIZE
from tests.probe.serving import Served

SERVER = "server"
"""Name of the servers in the store."""


@dataclass
class Restartable:
    """A registry over the fake provider whose HTTP server can be replaced by another, with a new store.

    The episodes go on meanwhile, as those of a server that takes its sandboxes back.
    """

    registry: EpisodeRegistry
    folder: Path
    listener: socket.socket
    tasks: TaskGroup
    tokens: Tokens | None = None
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self._stop = anyio.Event()
        self._stopped = anyio.Event()

    @property
    def served(self) -> Served:
        return Served(f"http://127.0.0.1:{self.listener.getsockname()[1]}", self.registry, self.folder)

    async def start(self) -> None:
        ready, self._stop, self._stopped = anyio.Event(), anyio.Event(), anyio.Event()
        self.registry.handing_over = False
        self.registry.drained = anyio.Event()
        self.tasks.start_soon(self._serve, ready)
        await ready.wait()

    async def _serve(self, ready: anyio.Event) -> None:
        with Store.open(self.folder, SERVER) as store:
            self.store = self.registry.store = store
            app = http_app(self.registry, tokens=self.tokens)
            listener = self.listener.dup()
            await serve_http(app, listener, drain=self._drain, on_ready=ready.set, stop=self._stop)
        self._stopped.set()

    async def _drain(self) -> None:
        self.registry.drained.set()

    async def stop(self) -> None:
        """End the server; its sessions stay in the store."""
        self.registry.handing_over = True
        self._stop.set()
        await self._stopped.wait()

    async def restart(self) -> None:
        await self.stop()
        await self.start()


@asynccontextmanager
async def restartable(
    tmp_path: Path, provider: FakeProvider | None = None, *, tokens: Tokens | None = None, **settings: Any
) -> AsyncGenerator[Restartable]:
    """A server over the fake provider that can be restarted."""
    provider = provider or FakeProvider(tools=TOOLS)
    folder = tmp_path / "store"
    folder.mkdir()
    async with running_registry(tmp_path, provider, **settings) as registry, background_tasks() as tasks:
        with listen("127.0.0.1", 0) as listener:
            server = Restartable(registry, folder, listener, tasks, tokens)
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
        session = cls(
            http,
            url,
            {
                **all_headers,
                "mcp-session-id": response.headers["mcp-session-id"],
                "mcp-protocol-version": version,
            },
        )
        await session.notify("notifications/initialized")
        return session

    @property
    def id(self) -> str:
        return self.headers["mcp-session-id"]

    async def notify(self, method: str) -> None:
        message = {"jsonrpc": "2.0", "method": method}
        assert (await self.http.post(self.url, json=message, headers=self.headers)).status_code == 202

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
    ) -> AsyncGenerator[tuple[httpx2.Response, list[str]]]:
        """Call a tool, past the first event. The list is of the lines received until then."""
        params = {"name": tool, "arguments": arguments}
        message = {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}
        async with self.http.stream("POST", self.url, json=message, headers=self.headers) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines: list[str] = []
            async for line in response.aiter_lines():
                if not line:
                    break
                lines.append(line)
            yield response, lines

    async def resume(self, event_id: str) -> Any:
        """GET what follows an event."""
        headers = {**self.headers, "Accept": "text/event-stream", "last-event-id": event_id}
        return await self.http.get(self.url, headers=headers)


def events_of(response: Any) -> list[dict[str, str]]:
    """The events of a response."""
    blocks = response.text.replace("\r\n", "\n").split("\n\n")
    return [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks if block.strip()]


def answer_of(response: Any) -> Any:
    """The JSON-RPC answer in a response, which is JSON or events."""
    if response.headers["content-type"].startswith("application/json"):
        return response.json()
    return next(
        message
        for event in events_of(response)
        if event.get("data") and "id" in (message := json.loads(event["data"]))
    )


@dataclass
class KillableServer:
    """A server in a process of its own, on a socket that this process holds."""

    folder: Path
    listener: socket.socket
    process: Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    async def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.http.restarted_server",
            str(self.listener.fileno()),
            str(self.folder),
        ]
        os.set_inheritable(self.listener.fileno(), True)
        self.process = await anyio.open_process(
            command, stdout=None, stderr=None, pass_fds=[self.listener.fileno()]
        )

    async def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    @property
    def calls(self) -> list[str]:
        """The texts with which the tool `slow` was called, in order."""
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    async def called(self, count: int) -> None:
        """Wait until the tool was called so often, by any client."""
        with anyio.fail_after(30):
            while len(self.calls) < count:  # noqa: ASYNC110  (a file of another process)
                await anyio.sleep(0.02)


@contextmanager
def held_socket() -> Generator[socket.socket]:
    with listen("127.0.0.1", 0) as listener:
        yield listener


@asynccontextmanager
async def killable_server(folder: Path) -> AsyncGenerator[KillableServer]:
    """A server that can be killed and started again; killed at the end."""
    with held_socket() as listener:
        server = KillableServer(folder, listener)
        await server.start()
        try:
            yield server
        finally:
            with anyio.CancelScope(shield=True):
                await server.kill()
