"""A server under its supervisor, which a test can kill."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import Process

from tests.probe.serving import SUITE

RESTART_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class SupervisedServer:
    """`serve` with its supervisor. `process` is the supervisor."""

    process: Process
    url: str
    state: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def server_pid(self) -> int | None:
        """The process that serves; None while there is none."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    async def kill(self) -> None:
        """Kill the server, and wait until the supervisor has started the next one."""
        killed = self.kill_at_once()
        with anyio.fail_after(RESTART_SECONDS):
            while self.server_pid in (None, killed):  # noqa: ASYNC110  (nothing announces it)
                await anyio.sleep(0.01)

    def kill_at_once(self) -> int | None:
        """Kill the server if there is one; returns its pid."""
        pid = self.server_pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid


@asynccontextmanager
async def supervised_server(
    state: Path, *arguments: str, provider: str = "host", suite: str = SUITE, port: int = 0
) -> AsyncGenerator[SupervisedServer]:
    """Start `serve` on a free port; at the end it is stopped by SIGTERM, and must end with status 0."""
    # Several servers can be on one folder.
    ready = state.parent / f"{state.name}-{secrets.token_hex(4)}.ready"
    options = [
        "--provider",
        provider,
        "--port",
        str(port),
        "--state",
        str(state),
        "--ready-file",
        str(ready),
        *arguments,
    ]
    command = [sys.executable, "-m", "decathlon_mcp.cli", "serve", "--suite", suite, *options]
    log = state.parent / f"{state.name}.log"
    with log.open("ab") as output:
        process = await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=output)
        async with process:
            try:
                with anyio.fail_after(60):
                    while not ready.exists():
                        assert process.returncode is None, log.read_text()
                        await anyio.sleep(0.02)
                yield SupervisedServer(process, ready.read_text().strip(), state)
            finally:
                with anyio.CancelScope(shield=True):
                    if process.returncode is None:
                        process.terminate()
                    with anyio.move_on_after(60) as scope:
                        await process.wait()
                    if scope.cancelled_caught:
                        process.kill()
