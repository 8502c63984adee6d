"""TCP connections to and from a sandbox's loopback, carried over the connection to its driver.

`decathlon_sandbox.wire` describes the protocol. The driver's side of it is not trusted: a notification about
a port that is not forwarded is ignored, and a tunnel whose peer violates the protocol, for instance by
sending more than its window, is reset.
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
"""Opens a connection to the target of a forwarded port. Raises OSError or DecathlonError if it cannot."""

MAX_TUNNELS = 256
"""Limit on the tunnels of one sandbox; the driver cannot open more."""
DIAL_SECONDS = 20.0
TUNNEL_NOTIFICATIONS = frozenset({wire.OPENED, wire.DATA, wire.TAKEN, wire.FINISHED, wire.RESET})

_Notify = Callable[[str, JsonObject], Awaitable[None]]
_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError, DecathlonError)


class Tunnel(ByteStream):
    """One TCP connection as a byte stream, for one reader and one writer."""

    def __init__(self, number: int, notify: _Notify, on_close: Callable[[], object]) -> None:
        self.number = number
        self._notify = notify
        self._on_close = on_close
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._send_window_bytes = wire.WINDOW_BYTES
        self._eof_received = False
        self._eof_sent = False
        self._closed = False
        self._broken = False
        self._peer_gone = False
        self._changed = anyio.Event()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._chunks:
            if self._broken:
                raise anyio.BrokenResourceError
            if self._eof_received:
                raise anyio.EndOfStream
            await self._changed.wait()
        chunk = self._chunks.popleft()
        if len(chunk) > max_bytes:
            self._chunks.appendleft(chunk[max_bytes:])
            chunk = chunk[:max_bytes]
        self._buffered_bytes -= len(chunk)
        await self._send_notification(wire.TAKEN, bytes=len(chunk))
        return chunk

    async def send(self, item: bytes) -> None:
        remaining = memoryview(item)
        while remaining:
            if self._broken or self._eof_sent:
                raise anyio.BrokenResourceError
            if not self._send_window_bytes:
                await self._changed.wait()
                continue
            size = min(len(remaining), self._send_window_bytes, wire.CHUNK_BYTES)
            self._send_window_bytes -= size
            await self._send_notification(wire.DATA, data=base64.b64encode(remaining[:size]).decode())
            remaining = remaining[size:]

    async def send_eof(self) -> None:
        if not (self._eof_sent or self._broken):
            self._eof_sent = True
            await self._send_notification(wire.FINISHED)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._on_close()
        self.fail()
        if not self._peer_gone and not (self._eof_sent and self._eof_received):
            with anyio.CancelScope(shield=True), suppress(anyio.BrokenResourceError):
                await self._send_notification(wire.RESET)

    def handle(self, method: str, params: JsonObject) -> None:
        """Process one notification of the driver. Raises ValueError or TypeError if it is invalid."""
        if method == wire.DATA:
            chunk = base64.b64decode(params.get("data", ""), validate=True)
            self._buffered_bytes += len(chunk)
            if self._buffered_bytes > wire.WINDOW_BYTES:
                raise ValueError("more data than its window")
            if self._eof_received:
                raise ValueError("data after the end")
            if chunk:
                self._chunks.append(chunk)
        elif method == wire.TAKEN:
            count = params.get("bytes")
            if not isinstance(count, int) or count < 0:
                raise ValueError("not a number of bytes")
            self._send_window_bytes = min(self._send_window_bytes + count, wire.WINDOW_BYTES)
        elif method == wire.FINISHED:
            self._eof_received = True
        else:
            self._peer_gone = self._broken = True
        self._wake()

    def fail(self) -> None:
        """Make pending and later calls raise BrokenResourceError."""
        self._broken = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _send_notification(self, method: str, **params: object) -> None:
        try:
            await self._notify(method, {"conn": self.number, **params})
        except DecathlonError:
            self._peer_gone = self._broken = True
            raise anyio.BrokenResourceError from None


class Tunnels:
    """The tunnels of one sandbox."""

    def __init__(self, notify: _Notify) -> None:
        self._notify = notify
        self._open: dict[int, Tunnel] = {}
        self._targets: Mapping[int, Dialer] = {}
        self._tasks: TaskGroup | None = None
        self._last_number = 0
        self._refused: set[int] = set()

    def forward(self, targets: Mapping[int, Dialer], tasks: TaskGroup) -> None:
        """Connect tunnels that the driver opens for these ports to the targets, each in a task of `tasks`."""
        self._targets, self._tasks = {**self._targets, **targets}, tasks

    def create(self) -> Tunnel:
        """A tunnel for a connection that the driver is about to be asked for."""
        # Numbers of tunnels that this side opens are negative, the driver's are positive.
        self._last_number -= 1
        return self._add(self._last_number)

    def handle(self, method: str, params: JsonObject) -> None:
        """Process one of `TUNNEL_NOTIFICATIONS`; those for an unknown tunnel are ignored."""
        number = params.get("conn")
        if not isinstance(number, int):
            return
        if method == wire.OPENED:
            self._accept(number, params.get("port"))
        elif (tunnel := self._open.get(number)) is not None:
            try:
                tunnel.handle(method, params)
            except (ValueError, TypeError, binascii.Error):
                tunnel.fail()

    def close(self) -> None:
        """Break every tunnel, because the connection to the driver has ended."""
        for tunnel in tuple(self._open.values()):
            tunnel.fail()

    def _add(self, number: int) -> Tunnel:
        self._open[number] = tunnel = Tunnel(number, self._notify, lambda: self._open.pop(number, None))
        return tunnel

    def _accept(self, number: int, port: object) -> None:
        dial = self._targets.get(port) if isinstance(port, int) else None
        if self._tasks is None or dial is None or number in self._open:
            return
        if len(self._open) < MAX_TUNNELS:
            self._tasks.start_soon(_connect, self._add(number), dial)
        elif len(self._refused) < MAX_TUNNELS:
            # More come only from a driver that violates the protocol.
            self._refused.add(number)
            self._tasks.start_soon(self._refuse, number)

    async def _refuse(self, number: int) -> None:
        """Reset a tunnel that is not accepted: the driver would keep it open."""
        with suppress(DecathlonError):
            await self._notify(wire.RESET, {"conn": number})
        self._refused.discard(number)


async def _connect(tunnel: Tunnel, dial: Dialer) -> None:
    """Connect a tunnel to its target until both directions have ended or one is broken."""
    async with tunnel:
        with suppress(*_BROKEN, TimeoutError):
            with anyio.fail_after(DIAL_SECONDS):
                target = await dial()
            await _relay(tunnel, target)


async def _relay(tunnel: ByteStream, target: ByteStream) -> None:
    async with target, background_tasks() as tasks:
        backwards_done = anyio.Event()

        async def backwards() -> None:
            await _copy(target, tunnel)
            backwards_done.set()

        tasks.start_soon(backwards)
        await _copy(tunnel, target)
        await backwards_done.wait()


async def _copy(source: ByteStream, sink: ByteStream) -> None:
    """Copy everything and then the end of the stream; on an error both streams are closed."""
    try:
        while True:
            try:
                chunk = await source.receive()
            except anyio.EndOfStream:
                break
            await sink.send(chunk)
        await sink.send_eof()
    except _BROKEN:
        # Closing both makes the copy in the other direction end too.
        with anyio.CancelScope(shield=True):
            for stream in (source, sink):
                await anyio.aclose_forcefully(stream)
