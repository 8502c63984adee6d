"""The servers that the suites are run against, each a process of its own."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

SUITE = Path(__file__).parent / "suite"
FIXTURE = SUITE / "local_servers" / "conformance"
START_SECONDS = 60
STOP_SECONDS = 30


@asynccontextmanager
async def fixture_server() -> AsyncGenerator[str]:
    """The fixture by itself, over streamable HTTP; yields its address."""
    async with running([sys.executable, str(FIXTURE), "--http"]) as process:
        yield await first_line(process)


@asynccontextmanager
async def running(command: list[str]) -> AsyncGenerator[Process]:
    """A process that must still be there at the end, when it is terminated."""
    async with await anyio.open_process(command, stderr=None, env=environment()) as process:
        try:
            yield process
            assert process.returncode is None, f"the server ended with {process.returncode}"
        finally:
            if process.returncode is None:
                process.terminate()
            with anyio.CancelScope(shield=True), anyio.fail_after(STOP_SECONDS):
                await process.wait()


def closed_port() -> int:
    """A port of the loopback on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def environment() -> dict[str, str]:
    """This process's, with the Python of the tests as `python3`."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


async def first_line(process: Process) -> str:
    assert process.stdout is not None
    said = ""
    with anyio.fail_after(START_SECONDS):
        async for words in TextReceiveStream(process.stdout):
            said += words
            if "\n" in said:
                return said.partition("\n")[0]
    raise AssertionError(f"the server ended before it said where it is: {said!r}")
