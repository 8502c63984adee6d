"""A server in a separate process, which can be killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from tests.probe.serving import SUITE


@asynccontextmanager
async def server_process(state: Path) -> AsyncGenerator[tuple[Process, str]]:
    words = ["serve", "--suite", SUITE, "--provider", "host", "--port", "0", "--log-format", "json"]
    # The process that is killed is the server itself, and its sandboxes end with it.
    words += ["--no-supervisor", "--survive-seconds", "0"]
    command = [sys.executable, "-m", "decathlon_mcp.cli", *words, "--state", str(state)]
    async with await anyio.open_process(command, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        log = BufferedByteReceiveStream(process.stderr)
        entry: dict[str, Any] = {}
        while entry.get("message") != "listening":
            entry = json.loads(await log.receive_until(b"\n", 1 << 16))
        try:
            yield process, entry["url"]
        finally:
            if process.returncode is None:
                process.kill()
            # A sandbox that was paused when its server was killed has the pipe of its log, and the end of the
            # process is noticed only with the end of its pipes.
            with anyio.CancelScope(shield=True):
                await collect_garbage(state)


async def collect_garbage(state: Path) -> None:
    """Remove the sandboxes of a server that was killed; one that was paused does not end by itself."""
    command = [sys.executable, "-m", "decathlon_mcp.cli", "gc", "--abandon", "--state", str(state)]
    await anyio.run_process(command)
