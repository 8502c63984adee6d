"""The servers that the suites are run against, each a process of its own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream
from mcp import Client

SUITE = Path(__file__).parent / "suite"
FIXTURE = SUITE / "local_servers" / "conformance"
TASK = "everything"
IDLE_SECONDS = 15
"""The older suite never deletes a session: its episodes end by their lease, while later ones are played."""
START_SECONDS = 60
STOP_SECONDS = 60
ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)[/\s]")


class Output:
    """What a process says, read as it comes: where it is, and its last words for a test that fails."""

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self._stream = TextReceiveStream(process.stdout, errors="replace")
        self._said = ""
        self._address: str | None = None
        self._news = anyio.Event()

    @property
    def tail(self) -> str:
        return self._said[-4000:]

    async def read(self) -> None:
        async for words in self._stream:
            self._said += words
            if self._address is None and (found := ADDRESS.search(self._said)):
                self._address = found[1]
                self._news.set()
        self._news.set()

    async def address(self) -> str:
        with anyio.fail_after(START_SECONDS):
            await self._news.wait()
        assert self._address, f"the server ended before it said where it is: {self.tail}"
        return self._address


@asynccontextmanager
async def running(*command: str) -> AsyncGenerator[str]:
    """A server's base address. It must still be there at the end, when it is told to stop."""
    async with (
        await anyio.open_process(command, stderr=subprocess.STDOUT, env=environment()) as process,
        anyio.create_task_group() as tasks,
    ):
        output = Output(process)
        tasks.start_soon(output.read)
        try:
            yield await output.address()
            assert process.returncode is None, f"the server ended by itself: {output.tail}"
        finally:
            with anyio.CancelScope(shield=True):
                await stop(process)


async def stop(process: Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    with anyio.move_on_after(STOP_SECONDS):
        await process.wait()
        return
    process.kill()


def fixture_by_itself() -> Sequence[str]:
    """The command that serves the fixture over streamable HTTP."""
    return (sys.executable, str(FIXTURE), "--http")


def decathlon(state: Path) -> Sequence[str]:
    """The command that serves the suite around the fixture."""
    program = Path(sys.executable).parent / "decathlon-mcp"
    where = ("--suite", str(SUITE), "--provider", "local", "--names", "raw", "--port", "0")
    return (str(program), "serve", *where, "--state", str(state), "--idle-seconds", str(IDLE_SECONDS))


async def start_episode(base: str) -> str:
    """The address of a new episode, started in the lobby."""
    async with Client(f"{base}/mcp") as lobby:
        started = await lobby.call_tool("start_episode", {"task": TASK})
    assert not started.is_error, started.content
    return str(started.structured_content["address"])


def closed_port() -> int:
    """A port of the loopback on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def environment() -> dict[str, str]:
    """This process's, with the Python of the tests as `python3`."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
