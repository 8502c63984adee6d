"""Reading this process's stdin so that the read can be ended, by a signal for example."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from typing import Self

import anyio

CHUNK_BYTES = 1 << 16


class StdinPump:
    """Copies a file descriptor into a socket until the descriptor ends or `stop` is called.

    Readers of the socket's other end then see the end of the file.
    """

    # A thread that blocks in a read of stdin cannot be interrupted. This daemon thread need not be: readers
    # use the socket, which can be shut down under them.

    def __init__(self, source: int, sink: socket.socket) -> None:
        self._source = source
        self._sink = sink
        threading.Thread(target=self._copy, name="stdin", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _copy(self) -> None:
        with suppress(OSError):
            while chunk := os.read(self._source, CHUNK_BYTES):
                self._sink.sendall(chunk)
        self.stop()

    def stop(self) -> None:
        """End the copy. Calling it again does nothing."""
        with suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)


async def stop_on_signal(pump: StdinPump) -> None:
    """Stop the pump at the first SIGTERM or SIGINT; return at once on systems without signal receivers."""
    with suppress(NotImplementedError), anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            pump.stop()
            return
