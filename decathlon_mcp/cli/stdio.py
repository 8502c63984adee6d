"""`stdio`: the server over this process's stdin and stdout."""

from __future__ import annotations

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager

from decathlon_mcp.beside import beside
from decathlon_mcp.cli.readiness import require_ready
from decathlon_mcp.cli.stdin import Valve, end_on_signal
from decathlon_mcp.episodes import open_episodes
from decathlon_mcp.observe import configure_logging
from decathlon_mcp.settings import Settings


async def serve(settings: Settings, task: str | None) -> int:
    """Serve until stdin ends, or SIGTERM or SIGINT has ended it; a second signal ends the process at once."""
    configure_logging(settings.log_level, settings.log_format)
    with _stdin_that_can_be_ended() as valve:
        async with open_episodes(settings) as episodes, beside() as tasks:
            await require_ready(episodes)
            # Only now: it takes a second to import, in which a missing engine can be told.
            from decathlon_mcp.edge import serve_stdio

            tasks.start_soon(end_on_signal, valve)
            await serve_stdio(episodes, task=task)
    return 0


@contextmanager
def _stdin_that_can_be_ended() -> Generator[Valve]:
    ours, theirs = socket.socketpair()
    with theirs, ours:
        valve = Valve(os.dup(0), ours)
        os.dup2(theirs.fileno(), 0)
        yield valve
