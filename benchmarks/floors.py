"""What our ways are held against: the bare attached stream, `docker exec`, `docker run`."""

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


class Attached:
    """The tool server as a container's first process; its stdin and stdout by the engine's attached stream.

    Raw JSON lines on a blocking socket: nothing could speak to it with less.
    """

    def __init__(self, container: str, stream: socket.socket) -> None:
        self.container = container
        self._stream = stream
        self._frames = stream.makefile("rb")
        self._number = 0

    async def shake_hands(self) -> None:
        client = {"name": "benchmark", "version": "1"}
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
        await self.ask("initialize", hello)
        self._send({"method": "notifications/initialized"})

    async def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """One request and its result. Blocks the event loop: nothing else is under way."""
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        return json.loads(self._line())["result"]

    def _send(self, message: dict[str, Any]) -> None:
        self._stream.sendall(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    def _line(self) -> bytes:
        """A line of stdout, out of the engine's frames."""
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
async def attached(image: str) -> AsyncGenerator[Attached]:
    """A container that ends, and is removed, with the stream."""
    api: Any = docker.APIClient()
    found = await anyio.to_thread.run_sync(_start, api, image)
    try:
        await found.shake_hands()
        yield found
    finally:
        found.close()
        api.remove_container(found.container, force=True)
        api.close()


def _start(api: Any, image: str) -> Attached:
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
    return Attached(container, stream)


async def docker_run(image: str) -> None:
    """A container that does nothing, without a network, removed."""
    command = ["docker", "run", "--rm", "--label", f"{LABEL}=run", "--network", "none", image]
    await anyio.run_process([*command, "python3", "-c", "pass"])


async def docker_exec(container: str) -> None:
    """What one call costs, before it has done anything, when each starts a process."""
    await anyio.run_process(["docker", "exec", container, "python3", "-c", "import mcp"])
