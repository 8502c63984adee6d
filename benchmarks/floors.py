"""Lower bounds to compare with: a container's bare attached stream, `docker exec`, `docker run`."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import docker

from benchmarks.running import TOOL_SERVER

LABEL = "decathlon.benchmark"
_STDOUT = 1


class AttachedServer:
    """The tool server as a container's first process, reached over the engine's attached stream.

    Sends raw JSON lines on a blocking socket, which is the least that any client has to do.
    """

    def __init__(self, container: str, stream: socket.socket) -> None:
        self.container = container
        self._stream = stream
        self._frames = stream.makefile("rb")
        self._last_id = 0

    async def initialize(self) -> None:
        client = {"name": "benchmark", "version": "1"}
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
        await self.request("initialize", params)
        self._send({"method": "notifications/initialized"})

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its result. Blocks the event loop."""
        self._last_id += 1
        self._send({"id": self._last_id, "method": method, "params": params})
        return json.loads(self._read_line())["result"]

    def _send(self, message: dict[str, Any]) -> None:
        self._stream.sendall(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    def _read_line(self) -> bytes:
        """Read a line of stdout from the frames of the engine's stream."""
        line = b""
        while not line.endswith(b"\n"):
            header = self._frames.read(8)
            content = self._frames.read(int.from_bytes(header[4:], "big"))
            if header[0] == _STDOUT:
                line += content
        return line

    def close(self) -> None:
        self._frames.close()
        self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


@asynccontextmanager
async def attached(image: str) -> AsyncGenerator[AttachedServer]:
    """Start the tool server in a container; remove the container at the end."""
    api: Any = docker.APIClient()
    server = await anyio.to_thread.run_sync(_start, api, image)
    try:
        await server.initialize()
        yield server
    finally:
        server.close()
        api.remove_container(server.container, force=True)
        api.close()


def _start(api: Any, image: str) -> AttachedServer:
    config: dict[str, Any] = {
        "Image": image,
        "Entrypoint": ["python3", "-c", TOOL_SERVER.read_text()],
        "Labels": {LABEL: "attached"},
        "OpenStdin": True,
        "StdinOnce": True,
        "NetworkDisabled": True,
        "HostConfig": {"NetworkMode": "none", "LogConfig": {"Type": "none", "Config": {}}},
    }
    container = str(api.create_container_from_config(config, None)["Id"])
    wrapper = api.attach_socket(container, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    stream = socket.socket(fileno=os.dup(wrapper.fileno()))
    wrapper._response.close()
    wrapper.close()
    stream.setblocking(True)
    api.start(container)
    return AttachedServer(container, stream)


async def docker_run(image: str) -> None:
    """Run a container that does nothing, without a network, and remove it."""
    command = ["docker", "run", "--rm", "--label", f"{LABEL}=run", "--network", "none", image]
    await anyio.run_process([*command, "python3", "-c", "pass"])


async def docker_exec(container: str) -> None:
    """Start a process that imports the SDK, which is the least that a process per call costs."""
    await anyio.run_process(["docker", "exec", container, "python3", "-c", "import mcp"])
