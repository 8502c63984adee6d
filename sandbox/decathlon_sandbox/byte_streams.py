"""Non-blocking byte streams: readers and writers of descriptors, backpressure, bounded buffers and lines."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable

from decathlon_sandbox.event_loop import EventLoop

CHUNK_BYTES = 1 << 16
PIPE_BYTES = 1 << 20
"""Default upper limit of a pipe's capacity; only root can exceed it."""
LINE_EDGE_BYTES = 1024


class Backpressure:
    """Pauses readers while the server does not acknowledge the driver's output."""

    def __init__(self) -> None:
        self.paused = False
        self.readers: set[Reader] = set()

    def set(self, paused: bool) -> None:
        if paused != self.paused:
            self.paused = paused
            for reader in tuple(self.readers):
                reader.update()


class Reader:
    """Reads chunks from a descriptor. Owns the descriptor.

    `failed`: whether an error, and no end, was read.
    """

    def __init__(
        self,
        loop: EventLoop,
        fd: int,
        on_chunk: Callable[[bytes], object],
        on_end: Callable[[], object] | None = None,
        backpressure: Backpressure | None = None,
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._on_chunk = on_chunk
        self._on_end = on_end
        self._backpressure = backpressure
        self._max_bytes = CHUNK_BYTES
        self._watching = False
        self._closed = False
        self.failed = False
        os.set_blocking(fd, False)
        if backpressure is not None:
            backpressure.readers.add(self)
        self.update()

    def limit(self, max_bytes: int) -> None:
        """Read at most so many bytes at once; nothing with 0."""
        self._max_bytes = min(max_bytes, CHUNK_BYTES)
        self.update()

    def update(self) -> None:
        """Start or stop watching the descriptor, depending on the limit and the backpressure."""
        watch = not (self._closed or (self._backpressure is not None and self._backpressure.paused))
        watch = watch and self._max_bytes > 0
        if watch and not self._watching:
            self._loop.add_reader(self._fd, self._on_readable)
        elif self._watching and not watch:
            self._loop.remove(self._fd)
        self._watching = watch

    def read_available(self) -> None:
        """Read what is already there, at most the capacity of a pipe."""
        read_bytes = 0
        while not self._closed and read_bytes < PIPE_BYTES:
            chunk = self._read()
            if not chunk:
                break
            read_bytes += len(chunk)
            self._on_chunk(chunk)

    def drain(self) -> None:
        """Read what is already there, then close."""
        self.read_available()
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.update()
        if self._backpressure is not None:
            self._backpressure.readers.discard(self)
        os.close(self._fd)

    def _on_readable(self) -> None:
        chunk = self._read()
        if chunk:
            self._on_chunk(chunk)
        elif chunk is not None:
            self.close()
            if self._on_end is not None:
                self._on_end()

    def _read(self) -> bytes | None:
        """Return a chunk, b"" at the end, or None if nothing is there yet."""
        try:
            return os.read(self._fd, self._max_bytes)
        except BlockingIOError:
            return None
        except OSError:
            self.failed = True
            return b""


class Writer:
    """Writes to a descriptor and queues what it does not accept yet. Owns the descriptor.

    `on_written` is called with the number of bytes of each write, and with 0 after an error has closed it.
    """

    def __init__(self, loop: EventLoop, fd: int, on_written: Callable[[int], object] | None = None) -> None:
        self._loop = loop
        self._fd = fd
        self._on_written = on_written
        self._queue: collections.deque[memoryview] = collections.deque()
        self.closed = False
        self.queued_bytes = 0
        os.set_blocking(fd, False)

    def send(self, data: bytes) -> None:
        """Write what is accepted now and queue the rest. No effect once closed or broken."""
        if self.closed or not data:
            return
        self._queue.append(memoryview(data))
        self.queued_bytes += len(data)
        if len(self._queue) == 1:
            self._write()
            if self._queue:
                self._loop.add_writer(self._fd, self._on_writable)

    def close(self) -> None:
        """Close the descriptor; queued data is lost."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove(self._fd)
        self._queue.clear()
        self.queued_bytes = 0
        os.close(self._fd)

    def _on_writable(self) -> None:
        self._write()
        if not self._queue and not self.closed:
            self._loop.remove(self._fd)

    def _write(self) -> None:
        """Write the first part of the queue, as far as it is accepted."""
        count, head = 0, self._queue[0]
        try:
            count = os.write(self._fd, head)
        except BlockingIOError:
            return
        except OSError:
            self.close()
        else:
            self.queued_bytes -= count
            if count < len(head):
                self._queue[0] = head[count:]
            else:
                self._queue.popleft()
        if self._on_written is not None:
            self._on_written(count)


class LineSplitter:
    """Splits chunks into lines and calls `on_line` with each, without its terminator.

    An unterminated last line is dropped. Of a line longer than `limit_bytes` only the first and the last
    kilobyte are kept; they are passed to `on_overlong`.
    """

    def __init__(
        self,
        limit_bytes: int,
        on_line: Callable[[bytes], object],
        on_overlong: Callable[[bytes, bytes], object],
    ) -> None:
        self._limit_bytes = limit_bytes
        self._on_line = on_line
        self._on_overlong = on_overlong
        self._partial = bytearray()
        self._overlong_head: bytes | None = None

    def feed(self, chunk: bytes) -> None:
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            if self._partial or len(line) > self._limit_bytes:
                self._append(line)
                self._finish_line()
            else:
                self._on_line(line)
        if rest:
            self._append(rest)

    def _finish_line(self) -> None:
        line, self._partial = bytes(self._partial), bytearray()
        head, self._overlong_head = self._overlong_head, None
        if head is not None:
            self._on_overlong(head, line)
        else:
            self._on_line(line)

    def _append(self, part: bytes) -> None:
        self._partial += part
        if self._overlong_head is None and len(self._partial) > self._limit_bytes:
            self._overlong_head = bytes(self._partial[:LINE_EDGE_BYTES])
        if self._overlong_head is not None:
            del self._partial[:-LINE_EDGE_BYTES]


class TailBuffer:
    """Keeps the last `limit_bytes` of a stream."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._data = bytearray()
        self._is_cut = False

    def feed(self, chunk: bytes) -> None:
        self._data += chunk
        if len(self._data) > self._limit_bytes:
            self._is_cut = True
        if len(self._data) > self._limit_bytes + CHUNK_BYTES:
            del self._data[: -self._limit_bytes or None]

    def text(self) -> str:
        """Decode as UTF-8 with invalid bytes replaced; a character cut at the start is left out."""
        data = bytes(self._data[-self._limit_bytes :]) if self._limit_bytes else b""
        start = 0
        while self._is_cut and start < min(3, len(data)) and 0x80 <= data[start] < 0xC0:
            start += 1
        return data[start:].decode("utf-8", "replace")
