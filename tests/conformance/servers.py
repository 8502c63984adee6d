"""The servers that the suites run against, each in its own process."""

from __future__ import annotations

import os
import re
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
TASK = "everything"
IDLE_SECONDS = 15
START_SECONDS = 60
STOP_SECONDS = 60
ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)[/\s]")


class Output:
    """Reads a process's output while it runs, for its address and for the message of a failing test."""

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self._stream = TextReceiveStream(process.stdout, errors="replace")
        self._text = ""
        self._address: str | None = None
        self._address_known = anyio.Event()

    @property
    def tail(self) -> str:
        return self._text[-4000:]

    async def read(self) -> None:
        async for text in self._stream:
            self._text += text
            if self._address is None and (match := ADDRESS.search(self._text)):
                self._address = match[1]
                self._address_known.set()
        self._address_known.set()

    async def address(self) -> str:
        with anyio.fail_after(START_SECONDS):
            await self._address_known.wait()
        assert self._address, f"the server ended before it printed its address: {self.tail}"
        return self._address


@asynccontextmanager
async def running(*command: str) -> AsyncGenerator[str]:
    """Run a server and yield its base URL. Fails if the server ends before the context does."""
    async with (
        await anyio.open_process(command, stderr=subprocess.STDOUT, env=environment()) as process,
        anyio.create_task_group() as tasks,
    ):
        output = Output(process)
        tasks.start_soon(output.read)
        try:
            yield await output.address()
            assert process.returncode is None, f"the server ended early: {output.tail}"
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


def decathlon_command(state: Path) -> Sequence[str]:
    """Command that serves the suite whose task has the fixture as its server."""
    program = Path(sys.executable).parent / "decathlon-mcp"
    options = ("--suite", str(SUITE), "--provider", "host", "--names", "raw", "--port", "0")
    return (str(program), "serve", *options, "--state", str(state), "--idle-seconds", str(IDLE_SECONDS))


async def start_episode(base: str) -> str:
    """Start an episode in the lobby and return its address."""
    async with Client(f"{base}/mcp") as lobby:
        started = await lobby.call_tool("start_episode", {"task": TASK})
    assert not started.is_error, started.content
    return str(started.structured_content["address"])


def environment() -> dict[str, str]:
    """This process's environment, with the tests' Python first in PATH, as `python3`."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
