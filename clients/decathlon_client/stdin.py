"""This process's stdin, of which a read can be ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from decathlon_client.background import background_tasks

CHUNK_BYTES = 1 << 16


class Valve:
    """Copies one descriptor into a socket, by a thread, until that ends or `end` is called.

    A thread that blocks in a read of stdin cannot be interrupted; this one need not be: nobody waits for it.
    """

    def __init__(self, source: int, into: socket.socket) -> None:
        self._source = source
        self._into = into
        threading.Thread(target=self._copy, name="stdin", daemon=True).start()

    def _copy(self) -> None:
        with suppress(OSError):
            while chunk := os.read(self._source, CHUNK_BYTES):
                self._into.sendall(chunk)
        self.end()

    def end(self) -> None:
        """Whoever reads sees the end of the file."""
        with suppress(OSError):
            self._into.shutdown(socket.SHUT_WR)


async def end_on_signal(valve: Valve) -> None:
    """The first SIGTERM or SIGINT is the end of stdin; where there are no signals, nothing is."""
    with suppress(NotImplementedError), anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            valve.end()
            return


@asynccontextmanager
async def stdin_lines(limit_bytes: int) -> AsyncGenerator[AsyncIterator[bytes]]:
    """The lines of stdin until it ends, or a signal ends it. One that is longer raises ValueError."""
    ours, theirs = socket.socketpair()
    with ours:
        valve = Valve(os.dup(0), ours)
        reader, writer = await asyncio.open_connection(sock=theirs, limit=limit_bytes)
        try:
            async with background_tasks() as tasks:
                tasks.start_soon(end_on_signal, valve)
                yield reader
        finally:
            writer.close()
