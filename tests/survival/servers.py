"""A server as users start it, in processes that a test can measure and kill."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx2
from anyio.abc import Process

from tests.driver.peer import until
from tests.probe.serving import SUITE


@dataclass(frozen=True, slots=True)
class SupervisedServer:
    """`serve` with its supervisor. `process` is the supervisor, or the server if there is none."""

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

    def memory_mib(self, name: str = "VmRSS") -> float:
        """Memory of `process`; `VmHWM` is its peak since `reset_peak`."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

    def reset_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[list[float]]:
        """Yields the seconds that `/healthz` took, again and again while the context is open."""
        seconds: list[float] = []

        async def watch() -> None:
            async with httpx2.AsyncClient(timeout=60) as http:
                while True:
                    started = anyio.current_time()
                    (await http.get(f"{self.url}/healthz")).raise_for_status()
                    seconds.append(anyio.current_time() - started)
                    await anyio.sleep(0.05)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            yield seconds
            tasks.cancel_scope.cancel()

    async def kill(self) -> None:
        """Kill the server, and wait until the supervisor has started the next one."""
        killed = self.kill_at_once()
        await until(lambda: self.server_pid not in (None, killed))

    def kill_at_once(self) -> int | None:
        """Kill the server if there is one; returns its pid."""
        pid = self.server_pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid


@asynccontextmanager
async def supervised_server(
    state: Path,
    *arguments: str,
    provider: str = "host",
    suite: str = SUITE,
    port: int = 0,
    launcher: Sequence[str] = (),
) -> AsyncGenerator[SupervisedServer]:
    """Start `serve` on a free port; at the end it is stopped by SIGTERM.

    `launcher`: a command line that executes the rest of it.
    """
    # Several servers can be on one folder.
    ready = state.parent / f"{state.name}-{secrets.token_hex(4)}.ready"
    command = [*launcher, sys.executable, "-m", "decathlon_mcp.cli", "serve", f"--suite={suite}"]
    command += [f"--provider={provider}", f"--port={port}", f"--state={state}", f"--ready-file={ready}"]
    command += arguments
    log = state.parent / f"{state.name}.log"
    with log.open("ab") as output:
        process = await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=output)
        async with process:
            try:
                await until(lambda: ready.exists() or process.returncode is not None)
                assert process.returncode is None, log.read_text()
                yield SupervisedServer(process, ready.read_text().strip(), state)
            finally:
                with anyio.CancelScope(shield=True):
                    if process.returncode is None:
                        process.terminate()
                    with anyio.move_on_after(60) as scope:
                        await process.wait()
                    if scope.cancelled_caught:
                        process.kill()
