"""TCP connections of a sandbox's loopback as byte streams at this end of the line (`wire` says how).

What the other end says is not trusted: a connection that is told of for a port that nobody forwards, or that
sends more than its window, is reset, and nothing else comes of it.
"""

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import anyio
from anyio.abc import ByteStream, TaskGroup
from decathlon_sandbox import wire

from decathlon_mcp.background import background_tasks
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.types import JsonObject

Dialer = Callable[[], Awaitable[ByteStream]]
"""Opens a connection to what a port leads to. Raises OSError or DecathlonError where nothing answers."""

MOST_CONNECTIONS = 256
DIAL_SECONDS = 20.0
OF_CONNECTIONS = frozenset({wire.OPENED, wire.DATA, wire.TAKEN, wire.FINISHED, wire.RESET})

_Say = Callable[[str, JsonObject], Awaitable[None]]
_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError, DecathlonError)


class Connection(ByteStream):
    """One of them. To be used by one reader and one writer, and closed."""

    def __init__(self, number: int, say: _Say, on_close: Callable[[], object]) -> None:
        self.number = number
        self._say = say
        self._on_close = on_close
        self._chunks: deque[bytes] = deque()
        self._held_bytes = 0
        self._window_bytes = wire.WINDOW_BYTES
        self._heard_all = False
        self._said_all = False
        self._closed = False
        self._broken = False
        self._reset = False
        """Has the driver said that it is broken?"""
        self._news = anyio.Event()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._chunks:
            if self._broken:
                raise anyio.BrokenResourceError
            if self._heard_all:
                raise anyio.EndOfStream
            await self._news.wait()
        chunk = self._chunks.popleft()
        if len(chunk) > max_bytes:
            self._chunks.appendleft(chunk[max_bytes:])
            chunk = chunk[:max_bytes]
        self._held_bytes -= len(chunk)
        await self._tell(wire.TAKEN, bytes=len(chunk))
        return chunk

    async def send(self, item: bytes) -> None:
        rest = memoryview(item)
        while rest:
            if self._broken or self._said_all:
                raise anyio.BrokenResourceError
            if not self._window_bytes:
                await self._news.wait()
                continue
            size = min(len(rest), self._window_bytes, wire.CHUNK_BYTES)
            self._window_bytes -= size
            await self._tell(wire.DATA, data=base64.b64encode(rest[:size]).decode())
            rest = rest[size:]

    async def send_eof(self) -> None:
        if not (self._said_all or self._broken):
            self._said_all = True
            await self._tell(wire.FINISHED)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._on_close()
        self.wake(broken=True)
        if not self._reset and not (self._said_all and self._heard_all):
            with anyio.CancelScope(shield=True), suppress(anyio.BrokenResourceError):
                await self._tell(wire.RESET)

    def hear(self, method: str, params: JsonObject) -> None:
        """What the driver says of it. Raises ValueError where that is not of the wire's form."""
        if method == wire.DATA:
            chunk = base64.b64decode(params.get("data", ""), validate=True)
            self._held_bytes += len(chunk)
            if self._held_bytes > wire.WINDOW_BYTES or self._heard_all:
                raise ValueError("more than its window")
            if chunk:
                self._chunks.append(chunk)
        elif method == wire.TAKEN:
            count = params.get("bytes")
            if not isinstance(count, int) or count < 0:
                raise ValueError("no number of bytes")
            self._window_bytes = min(self._window_bytes + count, wire.WINDOW_BYTES)
        elif method == wire.FINISHED:
            self._heard_all = True
        else:
            self._reset = self._broken = True
        self.wake()

    def wake(self, *, broken: bool = False) -> None:
        self._broken = self._broken or broken
        self._news.set()
        self._news = anyio.Event()

    async def _tell(self, method: str, **params: object) -> None:
        try:
            await self._say(method, {"conn": self.number, **params})
        except DecathlonError:
            self._reset = self._broken = True
            raise anyio.BrokenResourceError from None


class Tunnels:
    """All of one line. `tasks`: where those that come from inside are served."""

    def __init__(self, say: _Say) -> None:
        self._say = say
        self._live: dict[int, Connection] = {}
        self._targets: Mapping[int, Dialer] = {}
        self._tasks: TaskGroup | None = None
        self._last = 0

    def serve(self, targets: Mapping[int, Dialer], tasks: TaskGroup) -> None:
        """From now on, lead connections to these ports where the dials do."""
        self._targets, self._tasks = {**self._targets, **targets}, tasks

    def dialled(self) -> Connection:
        """A connection that the driver is about to be asked for."""
        self._last -= 1
        return self._keep(self._last)

    def _keep(self, number: int) -> Connection:
        self._live[number] = connection = Connection(number, self._say, lambda: self._live.pop(number, None))
        return connection

    def hear(self, method: str, params: JsonObject) -> None:
        """What the driver says of one of them."""
        number = params.get("conn")
        if not isinstance(number, int):
            return
        if method == wire.OPENED:
            self._open(number, params.get("port"))
        elif (connection := self._live.get(number)) is not None:
            try:
                connection.hear(method, params)
            except (ValueError, TypeError, binascii.Error):
                connection.wake(broken=True)

    def end(self) -> None:
        """The line has ended."""
        for connection in (*self._live.values(),):
            connection.wake(broken=True)

    def _open(self, number: int, port: object) -> None:
        dial = self._targets.get(port) if isinstance(port, int) else None
        if self._tasks is None or dial is None or number in self._live or len(self._live) >= MOST_CONNECTIONS:
            return
        self._tasks.start_soon(_lead, self._keep(number), dial)


async def _lead(inner: Connection, dial: Dialer) -> None:
    """Carry a connection from inside to where it leads, until both ways have ended or one is broken."""
    async with inner:
        with suppress(*_BROKEN, TimeoutError):
            with anyio.fail_after(DIAL_SECONDS):
                outer = await dial()
            await _couple(inner, outer)


async def _couple(inner: ByteStream, outer: ByteStream) -> None:
    async with outer, background_tasks() as tasks:
        back = anyio.Event()

        async def backwards() -> None:
            await _carry(outer, inner)
            back.set()

        tasks.start_soon(backwards)
        await _carry(inner, outer)
        await back.wait()


async def _carry(source: ByteStream, sink: ByteStream) -> None:
    """All that comes, then the end of it. Where one is broken both are closed, for the other way to see."""
    try:
        while True:
            try:
                chunk = await source.receive()
            except anyio.EndOfStream:
                break
            await sink.send(chunk)
        await sink.send_eof()
    except _BROKEN:
        with anyio.CancelScope(shield=True):
            for stream in (source, sink):
                await anyio.aclose_forcefully(stream)
