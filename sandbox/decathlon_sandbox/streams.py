"""Descriptors that never block: bytes in, bytes out, and the gate that holds readers while nobody takes."""

from __future__ import annotations

import collections
import os
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from decathlon_sandbox.loop import Loop

CHUNK_BYTES = 1 << 16
PIPE_BYTES = 1 << 20
"""More than a pipe holds unless root made it larger."""


class Gate:
    """Open or shut. While it is shut, sources that stand behind it do not read, and threads wait."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._sources: set[Source] = set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def set(self, *, is_open: bool) -> None:
        if is_open == self._open.is_set():
            return
        if is_open:
            self._open.set()
        else:
            self._open.clear()
        for source in tuple(self._sources):
            source.heed()

    def wait(self) -> None:
        """For threads other than the loop's."""
        self._open.wait()

    def admit(self, source: Source) -> None:
        self._sources.add(source)

    def dismiss(self, source: Source) -> None:
        self._sources.discard(source)


class Source:
    """What comes out of a descriptor, in chunks. Owns the descriptor."""

    def __init__(
        self,
        loop: Loop,
        fd: int,
        on_chunk: Callable[[bytes], object],
        on_end: Callable[[], object] | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._on_chunk = on_chunk
        self._on_end = on_end
        self._gate = gate
        self._watched = False
        self._closed = False
        os.set_blocking(fd, False)
        if gate is not None:
            gate.admit(self)
        self.heed()

    def heed(self) -> None:
        """Read, or do not, as the gate says."""
        wanted = not self._closed and (self._gate is None or self._gate.is_open)
        if wanted and not self._watched:
            self._loop.reads(self._fd, self._pump)
        elif self._watched and not wanted:
            self._loop.forget(self._fd)
        self._watched = wanted

    def drain(self) -> None:
        """Take what is there already, at most what a pipe holds, and close."""
        self.take()
        self.close()

    def take(self) -> None:
        """Take what is there already, at most what a pipe holds."""
        taken = 0
        while not self._closed and taken < PIPE_BYTES:
            chunk = self._read()
            if not chunk:
                break
            taken += len(chunk)
            self._on_chunk(chunk)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.heed()
        if self._gate is not None:
            self._gate.dismiss(self)
        os.close(self._fd)

    def _pump(self) -> None:
        chunk = self._read()
        if chunk:
            self._on_chunk(chunk)
        elif chunk is not None:
            self.close()
            if self._on_end is not None:
                self._on_end()

    def _read(self) -> bytes | None:
        """A chunk; b"" at the end; None when there is nothing yet."""
        try:
            return os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""


class Sink:
    """Bytes into a descriptor, kept while the other end does not read. Owns the descriptor."""

    def __init__(
        self,
        loop: Loop,
        fd: int,
        *,
        on_broken: Callable[[], object] | None = None,
        gate: Gate | None = None,
        high_bytes: int = 1 << 20,
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._on_broken = on_broken
        self._gate = gate
        self._high_bytes = high_bytes
        self._queue: collections.deque[memoryview] = collections.deque()
        self._closed = False
        self.waiting_bytes = 0
        os.set_blocking(fd, False)

    def send(self, data: bytes) -> None:
        """Write now what can be written, the rest later; nothing once it is closed or broken."""
        if self._closed:
            return
        rest = memoryview(data)
        if not self._queue:
            rest = rest[self._write(rest) :]
            if self._closed or not rest:
                return
            self._loop.writes(self._fd, self._pump)
        self._queue.append(rest)
        self.waiting_bytes += len(rest)
        if self._gate is not None and self.waiting_bytes > self._high_bytes:
            self._gate.set(is_open=False)

    def close(self) -> None:
        """What was not written yet is lost."""
        if self._closed:
            return
        self._closed = True
        self._loop.forget(self._fd)
        self._queue.clear()
        self.waiting_bytes = 0
        os.close(self._fd)

    def _pump(self) -> None:
        head = self._queue[0]
        written = self._write(head)
        if self._closed:
            return
        self.waiting_bytes -= written
        if written < len(head):
            self._queue[0] = head[written:]
            return
        self._queue.popleft()
        if not self._queue:
            self._loop.forget(self._fd)
        if self._gate is not None and self.waiting_bytes <= self._high_bytes:
            self._gate.set(is_open=True)

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            if self._on_broken is not None:
                self._on_broken()
            return 0


class Tail:
    """The last bytes of what was fed to it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept = bytearray()
        self._fed_bytes = 0

    def feed(self, chunk: bytes) -> None:
        self._fed_bytes += len(chunk)
        self._kept += chunk
        if len(self._kept) > self._limit_bytes + CHUNK_BYTES:
            del self._kept[: -self._limit_bytes or None]

    @property
    def truncated(self) -> bool:
        return self._fed_bytes > self._limit_bytes

    def text(self) -> str:
        """UTF-8, bad bytes replaced; a character that the cut went through is left out."""
        if not self.truncated:
            return self._kept.decode("utf-8", "replace")
        kept = bytes(self._kept[-self._limit_bytes :]) if self._limit_bytes else b""
        start = 0
        while start < min(3, len(kept)) and 0x80 <= kept[start] < 0xC0:
            start += 1
        return kept[start:].decode("utf-8", "replace")


class Head:
    """The first bytes of what was fed to it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept = bytearray()
        self.truncated = False

    def feed(self, chunk: bytes) -> None:
        room = self._limit_bytes - len(self._kept)
        self.truncated = self.truncated or len(chunk) > room
        self._kept += chunk[:room]

    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")
