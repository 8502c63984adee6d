"""Lower bounds to compare with: a container's bare attached stream, its bare opening, `docker run`."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import docker
from anyio import CapacityLimiter

from benchmarks.load import for_each
from benchmarks.running import RUN_LABEL, SUITE, Run

OPENING = 4
"""Containers opened at the same time: `--max-opening` by default, above which the engine gets no faster."""
POOL_SIZE = 16
ENGINE_SECONDS = 120
TOOL_SERVERS: dict[str, tuple[str, ...]] = {"echo": ("python3", "-c"), "plain": ("python3", "-S", "-c")}
"""How to run the source of a tool server, by its name."""
_STDOUT = 1


class Engine:
    """Creates containers with as few requests as possible, for one run; in threads.

    `close` removes those that are left, such as one whose creation was cancelled.
    """

    def __init__(self, run: Run) -> None:
        self._containers: set[str] = set()
        self._run = run
        self._api: Any = docker.APIClient(max_pool_size=POOL_SIZE, timeout=ENGINE_SECONDS)
        self._limiter = CapacityLimiter(OPENING)

    async def start(self, command: Sequence[str]) -> tuple[str, socket.socket]:
        """Create, attach and start a container without a network; its id and the attached stream."""
        return await anyio.to_thread.run_sync(self._start, command, limiter=self._limiter)

    async def remove(self, container: str) -> None:
        await anyio.to_thread.run_sync(self._remove, container, limiter=self._limiter)

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            await for_each([partial(self.remove, container) for container in self._containers])
        self._api.close()

    def _start(self, command: Sequence[str]) -> tuple[str, socket.socket]:
        config: dict[str, Any] = {
            "Image": self._run.options.image,
            "Entrypoint": list(command),
            "Labels": {RUN_LABEL: self._run.id},
            "OpenStdin": True,
            "StdinOnce": True,
            "NetworkDisabled": True,
            "HostConfig": {"NetworkMode": "none", "LogConfig": {"Type": "none", "Config": {}}},
        }
        container = str(self._api.create_container_from_config(config, None)["Id"])
        self._containers.add(container)
        wrapper = self._api.attach_socket(container, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        stream = socket.socket(fileno=os.dup(wrapper.fileno()))
        wrapper._response.close()
        wrapper.close()
        self._api.start(container)
        return container, stream

    def _remove(self, container: str) -> None:
        self._containers.discard(container)
        self._api.remove_container(container, force=True)


@asynccontextmanager
async def engine(run: Run) -> AsyncGenerator[Engine]:
    opened = Engine(run)
    try:
        yield opened
    finally:
        await opened.close()


class AttachedServer:
    """A tool server as a container's first process, reached over the engine's attached stream.

    Sends raw JSON lines and unpacks the engine's frames, which is the least that any client has to do.
    """

    def __init__(self, container: str, stream: socket.socket) -> None:
        self.container = container
        self._stream = stream
        self._stream.setblocking(True)
        self._frames = stream.makefile("rb")
        self._last_id = 0

    def initialize(self) -> None:
        client = {"name": "benchmark", "version": "1"}
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
        self.request("initialize", params)
        self._stream.sendall(_line({"method": "notifications/initialized"}))

    def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its result. Blocks."""
        self._last_id += 1
        self._stream.sendall(_line({"id": self._last_id, "method": method, "params": params}))
        return json.loads(self._read_line())["result"]

    @asynccontextmanager
    async def concurrent(self) -> AsyncGenerator[AttachedSession]:
        """A session for a client that has many of them. Not to be mixed with `request`."""
        self._stream.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=self._stream.dup())
        try:
            yield AttachedSession(reader, writer)
        finally:
            writer.close()
            self._stream.setblocking(True)

    def _read_line(self) -> bytes:
        """Read a line of stdout from the frames of the engine's stream."""
        line = b""
        while not line.endswith(b"\n"):
            header = self._frames.read(8)
            content = self._frames.read(int.from_bytes(header[4:], "big"))
            if not content:
                raise EOFError("the tool server in the container has ended")
            if header[0] == _STDOUT:
                line += content
        return line

    def close(self) -> None:
        self._frames.close()
        self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


class AttachedSession:
    """`AttachedServer` without blocking."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._last_id = 1

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its result."""
        self._last_id += 1
        self._writer.write(_line({"id": self._last_id, "method": method, "params": params}))
        line = b""
        while not line.endswith(b"\n"):
            header = await self._reader.readexactly(8)
            content = await self._reader.readexactly(int.from_bytes(header[4:], "big"))
            if header[0] == _STDOUT:
                line += content
        return json.loads(line)["result"]


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"


@asynccontextmanager
async def attached(run: Run, count: int, server: str = "echo") -> AsyncGenerator[list[AttachedServer]]:
    """Open containers with the tool server of this name, all at once; each has answered `initialize`."""
    source = (SUITE / "local_servers" / f"{server}_server.py").read_text()
    command = (*TOOL_SERVERS[server], source)
    initializing = CapacityLimiter(2 * OPENING)
    servers: list[AttachedServer] = []
    async with engine(run) as api:

        async def open_one() -> None:
            opened = AttachedServer(*await api.start(command))
            servers.append(opened)
            await anyio.to_thread.run_sync(opened.initialize, limiter=initializing)

        try:
            await for_each([open_one] * count)
            yield servers
        finally:
            for one in servers:
                one.close()


async def docker_run(run: Run) -> None:
    """Run a container that does nothing, without a network, and remove it."""
    label = f"{RUN_LABEL}={run.id}"
    command = ["docker", "run", "--rm", "--label", label, "--network", "none", run.options.image]
    await anyio.run_process([*command, "python3", "-c", "pass"])


async def docker_exec(container: str) -> None:
    """Start a process that imports the SDK, which is the least that a process per call costs."""
    await anyio.run_process(["docker", "exec", container, "python3", "-c", "import mcp"])
