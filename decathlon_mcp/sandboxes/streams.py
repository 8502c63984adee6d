"""The stream and the log of a sandbox's first process."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
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


class PipeStream(ByteStream):
    """A byte stream over two pipes, both of which it takes over: it receives from one and sends to the other.

    It ends when its owner has called `peer_ended`; everything that was written before can still be received.
    """

    def __init__(self, receive_fd: int, send_fd: int) -> None:
        os.set_blocking(receive_fd, False)
        os.set_blocking(send_fd, False)
        self._receive_fd = receive_fd
        self._send_fd = send_fd
        self._send_closed = False
        self._closed = False
        self._peer_ended = False
        self._finished = anyio.Event()
        """Set when it is closed or the peer has ended."""
        self.ended = anyio.Event()
        """Set when the peer is known to have ended."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._closed:
            try:
                data = os.read(self._receive_fd, max_bytes)
            except BlockingIOError:
                if not self._peer_ended:
                    await self._wait(self._receive_fd, anyio.wait_readable)
                    continue
                data = b""
            if data:
                # Lets other tasks run. Shielded: data that has been read must not be lost to a cancellation.
                await anyio.lowlevel.cancel_shielded_checkpoint()
                return data
            if self._peer_ended:
                self.ended.set()
                raise anyio.EndOfStream
            # The peer has closed its output before it ends, as the driver does while it ends its processes.
            await self._finished.wait()
        raise anyio.ClosedResourceError

    async def send(self, item: bytes) -> None:
        remaining = memoryview(item)
        while remaining and not self._send_closed:
            if self._peer_ended:
                raise anyio.BrokenResourceError
            try:
                remaining = remaining[os.write(self._send_fd, remaining) :]
            except BlockingIOError:
                await self._wait(self._send_fd, anyio.wait_writable)
            except OSError as error:
                self.ended.set()
                raise anyio.BrokenResourceError from error
        if remaining:
            if self._closed:
                raise anyio.ClosedResourceError
            # After `send_eof`, as of a socket: the peer ends too.
            self.ended.set()
            raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        await self._close_send()

    def peer_ended(self) -> None:
        """End the stream after the data that has arrived, also if another process has the other end open."""
        if not self._closed:
            self._peer_ended = True
            self._finished.set()
            anyio.notify_closing(self._receive_fd)
            if not self._send_closed:
                anyio.notify_closing(self._send_fd)

    async def aclose(self) -> None:
        await self._close_send()
        if not self._closed:
            self._closed = True
            self._finished.set()
            await _close(self._receive_fd)

    async def _close_send(self) -> None:
        if not self._send_closed:
            self._send_closed = True
            await _close(self._send_fd)

    async def _wait(self, descriptor: int, wait: Callable[[int], Awaitable[None]]) -> None:
        # Woken by `peer_ended` too; then the caller looks again.
        with suppress(anyio.ClosedResourceError):
            await wait(descriptor)


async def _close(descriptor: int) -> None:
    anyio.notify_closing(descriptor)
    try:
        # A task that waits for the descriptor must have noticed before another file gets its number: its
        # clean-up (anyio 4.16, `wait_readable`) would remove a new waiter of that number.
        await anyio.lowlevel.cancel_shielded_checkpoint()
    finally:
        os.close(descriptor)


class EndedStream(ByteStream):
    """A stream that ended before it was opened."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        raise anyio.EndOfStream

    async def send(self, item: bytes) -> None:
        raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        pass

    async def aclose(self) -> None:
        pass
