"""One end of a connected socket as the line to a sandbox's first process.

Over `wait_readable`, not anyio's own UNIX stream: a receive there that is cancelled at the moment something
arrives leaves an InvalidStateError to the event loop (anyio 4.16: `add_reader(sock, future.set_result)`).
"""

from __future__ import annotations

import socket
from contextlib import suppress

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream


class SocketStream(ByteStream):
    """A byte stream over a socket that is shut down before it is closed, whoever else holds it.

    It takes the socket over. However the other end went away, what it wrote is read to the last byte, then
    EndOfStream.
    """

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        self._raw = raw
        self._closed = False
        self.ended = anyio.Event()
        """Set once the other end is known to be gone."""

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
                # Others get their turn; what has been read is never lost to a cancellation.
                await anyio.lowlevel.cancel_shielded_checkpoint()
                return data
            self.ended.set()
            raise anyio.EndOfStream
        raise anyio.ClosedResourceError

    async def send(self, item: bytes) -> None:
        rest = memoryview(item)
        while rest and not self._closed:
            try:
                rest = rest[self._raw.send(rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._raw)
            except OSError as error:
                self.ended.set()
                raise anyio.BrokenResourceError from error
        if rest:
            raise anyio.ClosedResourceError

    async def send_eof(self) -> None:
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_WR)

    def shut_down(self) -> None:
        """End the connection for both sides; what has arrived can still be read."""
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self.shut_down()
            anyio.notify_closing(self._raw)
            self._raw.close()
