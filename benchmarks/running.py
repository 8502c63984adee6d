"""The servers under measure, each a process of its own: this project's, and the suite's tool server."""

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
UP_SECONDS = 30.0
LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is a process."""

    url: str
    pid: int

    @property
    def cpu_seconds(self) -> float:
        """User and system time of its process so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Server(Running):
    """`url` is the base of every address; `owner` is what its containers are labelled with."""

    owner: str

    def task(self, task: str) -> str:
        return f"{self.url}/tasks/{task}/mcp"

    def episode(self, episode: str) -> str:
        return f"{self.url}/episodes/{episode}/mcp"

    async def health(self) -> dict[str, Any]:
        """What it says of itself."""
        async with httpx2.AsyncClient() as client:
            return json.loads((await client.get(f"{self.url}/healthz")).content)

    async def empty(self) -> None:
        """Wait until no sandbox is in use any more."""
        while (await self.health())["sandboxes"]:  # noqa: ASYNC110  (a count of another process)
            await anyio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def decathlon(image: str, sandboxes: int) -> AsyncGenerator[Server]:
    """This project's server as a user starts it, with the Docker provider."""
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
        async with _running([sys.executable, "-m", "decathlon_mcp.cli", "serve", *flags]) as process:
            with anyio.fail_after(UP_SECONDS):
                while not ready.exists():  # noqa: ASYNC110  (a file of another process)
                    await anyio.sleep(LOOK_SECONDS)
            (owner,) = (file.name for file in (folder / "servers").iterdir())
            yield Server(ready.read_text().strip(), process.pid, owner)


@asynccontextmanager
async def tool_server(answers: Literal["json", "events"]) -> AsyncGenerator[Running]:
    """The suite's tool server over the SDK's HTTP, outside Docker.

    `events` is what the SDK does when nobody says otherwise, `json` the fastest that it can. uvicorn takes
    uvloop and httptools where it finds them, here as in this project's server.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, str(TOOL_SERVER), str(listener.fileno()), answers]
        async with _running(command, listener.fileno()) as process:
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", process.pid)


@asynccontextmanager
async def _running(command: list[str], *passed: int) -> AsyncGenerator[Process]:
    process = await anyio.open_process(command, stdin=None, stdout=None, stderr=None, pass_fds=passed)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        with anyio.CancelScope(shield=True):
            await process.wait()
