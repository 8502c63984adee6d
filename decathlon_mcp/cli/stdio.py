"""`stdio`: the server over this process's stdin and stdout."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

import anyio

from decathlon_mcp.beside import beside
from decathlon_mcp.cli.readiness import require_ready
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

            tasks.start_soon(_end_on_signal, valve)
            await serve_stdio(episodes, task=task)
    return 0


async def _end_on_signal(valve: _Valve) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            valve.end()
            return


class _Valve:
    """Copies one descriptor into a socket, by a thread, until that ends or `end` is called.

    A thread that blocks in a read of stdin cannot be interrupted; this one need not be: nobody waits for it.
    """

    def __init__(self, source: int, into: socket.socket) -> None:
        self._source = source
        self._into = into
        threading.Thread(target=self._copy, name="stdin", daemon=True).start()

    def _copy(self) -> None:
        with suppress(OSError):
            while chunk := os.read(self._source, 1 << 16):
                self._into.sendall(chunk)
        self.end()

    def end(self) -> None:
        """Whoever reads sees the end of the file."""
        with suppress(OSError):
            self._into.shutdown(socket.SHUT_WR)


@contextmanager
def _stdin_that_can_be_ended() -> Generator[_Valve]:
    ours, theirs = socket.socketpair()
    with theirs, ours:
        valve = _Valve(os.dup(0), ours)
        os.dup2(theirs.fileno(), 0)
        yield valve
