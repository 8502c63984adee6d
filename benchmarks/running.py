"""The servers that are measured, each in its own process: this project's, and the suite's tool server."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anyio
import httpx2
from anyio.abc import Process

SUITE = Path(__file__).parent / "suite"
TOOL_SERVER = SUITE / "local_servers" / "echo_server.py"
START_SECONDS = 30.0
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server in another process."""

    url: str
    pid: int

    @property
    def cpu_seconds(self) -> float:
        """User and system time that the process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Server(ServerProcess):
    """This project's server: `url` is its base URL, `owner` the label of its containers."""

    owner: str

    def task(self, task: str) -> str:
        return f"{self.url}/tasks/{task}/mcp"

    def episode(self, episode: str) -> str:
        return f"{self.url}/episodes/{episode}/mcp"

    async def health(self) -> dict[str, Any]:
        async with httpx2.AsyncClient() as client:
            return json.loads((await client.get(f"{self.url}/healthz")).content)

    async def wait_until_empty(self) -> None:
        """Wait until no sandbox is in use."""
        while (await self.health())["sandboxes"]:  # noqa: ASYNC110  (a count of another process)
            await anyio.sleep(POLL_SECONDS)


@asynccontextmanager
async def decathlon(image: str, sandboxes: int) -> AsyncGenerator[Server]:
    """Start this project's server as a user does, with the Docker provider."""
    with tempfile.TemporaryDirectory(prefix="decathlon-benchmark-") as name:
        folder = Path(name)
        ready = folder / "ready"
        options = {
            "--suite": SUITE,
            "--provider": "docker",
            "--image": image,
            "--port": 0,
            "--state": folder,
            "--ready-file": ready,
            "--max-sandboxes": sandboxes,
            "--log-level": "warning",
        }
        flags = [str(part) for option in options.items() for part in option]
        command = [sys.executable, "-m", "decathlon_mcp.cli", "serve", "--no-supervisor", *flags]
        async with _start(command) as process:
            with anyio.fail_after(START_SECONDS):
                while not ready.exists():  # noqa: ASYNC110  (a file of another process)
                    await anyio.sleep(POLL_SECONDS)
            (owner,) = (file.name for file in (folder / "servers").iterdir())
            yield Server(ready.read_text().strip(), process.pid, owner)


@asynccontextmanager
async def tool_server(responses: Literal["json", "events"]) -> AsyncGenerator[ServerProcess]:
    """Start the suite's tool server over the SDK's streamable HTTP, outside Docker.

    `events` is the SDK's default response format, `json` its fastest. As for this project's server, uvicorn
    uses uvloop and httptools if they are installed.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, str(TOOL_SERVER), str(listener.fileno()), responses]
        async with _start(command, listener.fileno()) as process:
            yield ServerProcess(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", process.pid)


@asynccontextmanager
async def _start(command: list[str], *inherited_fds: int) -> AsyncGenerator[Process]:
    process = await anyio.open_process(command, stdin=None, stdout=None, stderr=None, pass_fds=inherited_fds)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        with anyio.CancelScope(shield=True):
            await process.wait()
