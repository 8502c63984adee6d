"""The stream and the log of a sandbox's first process."""

from __future__ import annotations

import asyncio
import os
import socket
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from decathlon_mcp.background import Flag

LOG_TAIL_BYTES = 8192
CHUNK_BYTES = 1 << 16
"""Most that is read at once."""


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


ChunkHandler: TypeAlias = Callable[[bytes], float]
"""Called with what has arrived; returns for how many seconds nothing is to be read."""


class ReadAhead:
    """Reads a descriptor, one chunk ahead. `read` is called with a size; at the end it returns nothing.

    The descriptor stays registered in the event loop from one chunk to the next. anyio's `wait_readable`
    registers it for each, which costs several system calls for every message.
    """

    def __init__(self, descriptor: int, read: Callable[[int], bytes]) -> None:
        self._descriptor = descriptor
        self._read = read
        self._chunk = b""
        self._at_end = False
        self._is_stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop, while it watches the descriptor."""
        self._waiter: asyncio.Future[None] | None = None
        self._rest: asyncio.TimerHandle | None = None
        """The end of the latest rest."""
        self.handler: ChunkHandler | None = None
        """Gets what arrives while a task waits for it, instead of that task."""

    async def receive(self, max_bytes: int) -> bytes:
        """What has arrived; empty at the end, or if it is stopped and nothing more is there.

        Lets other tasks run. If it is cancelled, nothing is lost.
        """
        while not self._chunk and not self._at_end:
            if not self._is_stopped:
                await self._wait()
                continue
            await anyio.lowlevel.checkpoint()
            self._read_chunk()
            break
        data, self._chunk = self._chunk[:max_bytes], self._chunk[max_bytes:]
        return data

    def stop(self) -> None:
        """Wait no more. What has arrived can still be received."""
        self._unwatch()
        self._is_stopped, self._at_end = True, False
        self._wake()

    def close(self) -> None:
        """Stop, and drop what has arrived: the descriptor is about to be closed."""
        self.stop()
        self._chunk, self._at_end = b"", True

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise anyio.BusyResourceError("reading from")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._watch(loop)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _on_readable(self) -> None:
        if self._chunk:
            self._unwatch()  # nobody receives now
            return
        self._read_chunk()
        waiter = self._waiter
        if self._chunk and self.handler is not None and waiter is not None and not waiter.done():
            self._handle(self.handler, waiter)
        elif self._chunk or self._at_end:
            self._wake()

    def _handle(self, handler: ChunkHandler, waiter: asyncio.Future[None]) -> None:
        chunk, self._chunk = self._chunk, b""
        try:
            seconds = handler(chunk)
        except Exception as error:  # noqa: BLE001  (raised where the task waits)
            if not waiter.done():
                waiter.set_exception(error)
            return
        if seconds:
            self.rest(seconds)

    def rest(self, seconds: float) -> None:
        """Read nothing for a while. For `read`, which has got what nobody receives."""
        if self._waiter is None:
            return
        self._unwatch()
        loop = self._waiter.get_loop()
        until = loop.time() + seconds
        # Both `read` and the handler may want a rest: the longer one counts.
        if self._rest is None or self._rest.when() < until:
            if self._rest is not None:
                self._rest.cancel()
            self._rest = loop.call_at(until, self._watch_again)

    def _watch_again(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and self._loop is None and not self._is_stopped:
            self._watch(waiter.get_loop())

    def _read_chunk(self) -> None:
        try:
            self._chunk = self._read(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            pass
        if not self._chunk:
            self._at_end = True
            self._unwatch()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(self._descriptor, self._on_readable)
        self._loop = loop

    def _unwatch(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class DirectStream(ByteStream):
    """A byte stream that can also send without waiting, and receive without waking a task."""

    _data: ReadAhead

    @abstractmethod
    def send_now(self, data: bytes | memoryview) -> int:
        """Send what there is room for; returns how many bytes that was.

        Raises BrokenResourceError, ClosedResourceError.
        """

    async def receive_each(self, handler: ChunkHandler) -> None:
        """Pass all that arrives to `handler`. Raises what `receive` raises at the end, and what it raises."""
        # A task that is woken for each message costs more than most messages.
        self._data.handler = handler
        try:
            while True:
                if seconds := handler(await self.receive(CHUNK_BYTES)):
                    await anyio.sleep(seconds)
        finally:
            self._data.handler = None


def _write_now(write: Callable[[bytes | memoryview], int], data: bytes | memoryview, ended: Flag) -> int:
    """Write what there is room for; returns how many bytes that was. Sets `ended` if the peer has ended."""
    try:
        return write(data)
    except BlockingIOError:
        return 0
    except OSError as error:
        ended.set()
        raise anyio.BrokenResourceError from error


class SocketStream(DirectStream):
    """A byte stream over a connected socket, which it takes over.

    However the peer ends, everything it wrote can be received, then EndOfStream is raised. Closing shuts the
    connection down for all holders of the socket.
    """

    # Not anyio's own UNIX stream: a receive there that is cancelled just when data arrives raises
    # InvalidStateError in the event loop (anyio 4.16: `add_reader(sock, future.set_result)`).

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        self._raw = raw
        self._data = ReadAhead(raw.fileno(), raw.recv)
        self._closed = False
        self.ended = Flag()
        """Set when the peer is known to have ended."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await self._data.receive(max_bytes)
        if data:
            return data
        if self._closed:
            raise anyio.ClosedResourceError
        self.ended.set()
        raise anyio.EndOfStream

    def send_now(self, data: bytes | memoryview) -> int:
        if self._closed:
            raise anyio.ClosedResourceError
        return _write_now(self._raw.send, data, self.ended)

    async def send(self, item: bytes) -> None:
        remaining = memoryview(item)
        while remaining := remaining[self.send_now(remaining) :]:
            await anyio.wait_writable(self._raw)

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
            self._data.close()
            anyio.notify_closing(self._raw)
            self._raw.close()


class PipeStream(DirectStream):
    """A byte stream over two pipes, both of which it takes over: it receives from one and sends to the other.

    It ends when its owner has called `peer_ended`; everything that was written before can still be received.
    """

    def __init__(self, receive_fd: int, send_fd: int) -> None:
        os.set_blocking(receive_fd, False)
        os.set_blocking(send_fd, False)
        self._receive_fd = receive_fd
        self._data = ReadAhead(receive_fd, partial(os.read, receive_fd))
        self._send_fd = send_fd
        self._send_closed = False
        self._closed = False
        self._peer_ended = False
        self._finished = Flag()
        """Set when it is closed or the peer has ended."""
        self.ended = Flag()
        """Set when the peer is known to have ended."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._closed:
            was_stopped = self._peer_ended
            if data := await self._data.receive(max_bytes):
                return data
            if was_stopped:
                self.ended.set()
                raise anyio.EndOfStream
            # The peer has closed its output before it ends, as the driver does while it ends its processes.
            await self._finished.wait()
        raise anyio.ClosedResourceError

    def send_now(self, data: bytes | memoryview) -> int:
        if self._closed:
            raise anyio.ClosedResourceError
        if self._send_closed:
            # After `send_eof`, as of a socket: the peer ends too.
            self.ended.set()
            raise anyio.BrokenResourceError
        if self._peer_ended:
            raise anyio.BrokenResourceError
        return _write_now(partial(os.write, self._send_fd), data, self.ended)

    async def send(self, item: bytes) -> None:
        remaining = memoryview(item)
        while remaining := remaining[self.send_now(remaining) :]:
            # Woken by `peer_ended` too; then it looks again.
            with suppress(anyio.ClosedResourceError):
                await anyio.wait_writable(self._send_fd)

    async def send_eof(self) -> None:
        await self._close_send()

    def peer_ended(self) -> None:
        """End the stream after the data that has arrived, also if another process has the other end open."""
        if not self._closed:
            self._peer_ended = True
            self._finished.set()
            self._data.stop()
            if not self._send_closed:
                anyio.notify_closing(self._send_fd)

    async def aclose(self) -> None:
        await self._close_send()
        if not self._closed:
            self._closed = True
            self._finished.set()
            self._data.close()
            os.close(self._receive_fd)

    async def _close_send(self) -> None:
        if not self._send_closed:
            self._send_closed = True
            anyio.notify_closing(self._send_fd)
            try:
                # A task that waits for the descriptor must have noticed before another file gets its number:
                # its clean-up (anyio 4.16, `wait_writable`) would remove a new waiter of that number.
                await anyio.lowlevel.cancel_shielded_checkpoint()
            finally:
                os.close(self._send_fd)


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
