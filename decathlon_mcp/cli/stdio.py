"""`stdio`: the server over this process's stdin and stdout."""

from __future__ import annotations

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager

from decathlon_client.stdin import StdinPump, stop_on_signal

from decathlon_mcp.app import bootstrap
from decathlon_mcp.background import background_tasks
from decathlon_mcp.cli.readiness import require_ready
from decathlon_mcp.settings import Settings
from decathlon_mcp.telemetry.logs import configure_logging


async def serve(settings: Settings, task: str | None) -> int:
    """Serve until stdin ends, or SIGTERM or SIGINT has ended it; a second signal ends the process at once."""
    configure_logging(settings.log_level, settings.log_format)
    with _stdin_that_can_be_ended() as valve:
        async with bootstrap(settings) as episodes, background_tasks() as tasks:
            await require_ready(episodes)
            # Only now: it takes a second to import, in which a missing engine can be told.
            from decathlon_mcp.protocol.streams import serve_stdio

            tasks.start_soon(stop_on_signal, valve)
            await serve_stdio(episodes, task=task)
    return 0


@contextmanager
def _stdin_that_can_be_ended() -> Generator[StdinPump]:
    ours, theirs = socket.socketpair()
    with theirs, ours:
        valve = StdinPump(os.dup(0), ours)
        os.dup2(theirs.fileno(), 0)
        yield valve
