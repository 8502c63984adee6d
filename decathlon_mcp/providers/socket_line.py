"""One end of a connected socket as the line to a sandbox's first process."""

from __future__ import annotations

import socket
from contextlib import suppress

import anyio
from anyio.abc import ByteStream, SocketStream, UNIXSocketStream


class SocketLine(ByteStream):
    """A byte stream over a socket that is shut down before it is closed, whoever else holds it.

    However the other end went away, what it wrote is read to the last byte, then EndOfStream.
    """

    def __init__(self, stream: SocketStream, raw: socket.socket) -> None:
        self._stream = stream
        self._raw = raw
        self.ended = anyio.Event()
        """Set once the other end is known to be gone."""

    @classmethod
    async def over(cls, raw: socket.socket) -> SocketLine:
        """Takes the socket over: it is closed with the stream, and here if that cannot be made."""
        try:
            if raw.family == socket.AF_UNIX:
                return cls(await UNIXSocketStream.from_socket(raw), raw)
            return cls(await SocketStream.from_socket(raw), raw)
        except BaseException:
            raw.close()
            raise

    async def receive(self, max_bytes: int = 65536) -> bytes:
        try:
            return await self._stream.receive(max_bytes)
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            self.ended.set()
            raise anyio.EndOfStream from None

    async def send(self, item: bytes) -> None:
        try:
            await self._stream.send(item)
        except anyio.BrokenResourceError:
            self.ended.set()
            raise

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    def shut_down(self) -> None:
        """End the connection for both sides; what has arrived can still be read."""
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)

    async def aclose(self) -> None:
        self.shut_down()
        await self._stream.aclose()
