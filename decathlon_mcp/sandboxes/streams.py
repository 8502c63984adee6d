"""The stream and the log of a sandbox's first process."""

from __future__ import annotations

import socket
from contextlib import suppress

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

LOG_TAIL_BYTES = 8192


class LogTail:
    """Keeps the last `LOG_TAIL_BYTES` of the data added."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes | memoryview) -> None:
        self._data += data[-LOG_TAIL_BYTES:]
        if len(self._data) > LOG_TAIL_BYTES:
            del self._data[:-LOG_TAIL_BYTES]

    def __str__(self) -> str:
        return self._data.decode("utf-8", "replace")


class SocketStream(ByteStream):
    """A byte stream over a connected socket, which it takes over.

    However the peer ends, everything it wrote can be received, then EndOfStream is raised. Closing shuts the
    connection down for all holders of the socket.
    """

    # Over `wait_readable`, not anyio's own UNIX stream: a receive there that is cancelled just when data
    # arrives raises InvalidStateError in the event loop (anyio 4.16: `add_reader(sock, future.set_result)`).

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        self._raw = raw
        self._closed = False
        self.ended = anyio.Event()
        """Set when the peer is known to have ended."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._closed:
            try:
                data = self._raw.recv(max_bytes)
            except BlockingIOError:
                await anyio.wait_readable(self._raw)
                continue
            except OSError:
                data = b""
            if data:
                # Lets other tasks run. Shielded: data that has been read must not be lost to a cancellation.
                await anyio.lowlevel.cancel_shielded_checkpoint()
                return data
            self.ended.set()
            raise anyio.EndOfStream
        raise anyio.ClosedResourceError

    async def send(self, item: bytes) -> None:
        remaining = memoryview(item)
        while remaining and not self._closed:
            try:
                remaining = remaining[self._raw.send(remaining) :]
            except BlockingIOError:
                await anyio.wait_writable(self._raw)
            except OSError as error:
                self.ended.set()
                raise anyio.BrokenResourceError from error
        if remaining:
            raise anyio.ClosedResourceError

    async def send_eof(self) -> None:
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_WR)

    def shut_down(self) -> None:
        """End the connection in both directions; data that has arrived can still be received."""
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self.shut_down()
            anyio.notify_closing(self._raw)
            self._raw.close()
