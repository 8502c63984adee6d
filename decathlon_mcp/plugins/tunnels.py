"""TCP connections to and from a sandbox's loopback, carried over the connection to its driver.

`forward`, `dial` and `resolve` are for the plug-ins that lead programs of a sandbox out of it, or into it.

`decathlon_sandbox.wire` describes the protocol. The driver's side of it is not trusted: a notification about
a port that is not forwarded is ignored, and a tunnel whose peer violates the protocol, for instance by
sending more than its window, is reset.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import anyio
import msgspec
from anyio import aclose_forcefully
from anyio.abc import ByteStream
from decathlon_sandbox import wire
from decathlon_sandbox.wire import TokenBucket
from msgspec import Meta

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.types import JsonObject

Dialer = Callable[[], Awaitable[ByteStream]]
"""Opens a connection to the target of a forwarded port. Raises OSError or DecathlonError if it cannot."""

MAX_TUNNELS = 256
"""Limit on the tunnels of one sandbox; the driver cannot open more."""
DIAL_SECONDS = 20.0
OPENINGS_PER_SECOND = 64
"""Limit on the connections that one sandbox opens, after MAX_TUNNELS of them: each costs the event loop half
a millisecond, and the driver two short lines."""
TUNNEL_NOTIFICATIONS = frozenset({wire.OPENED, wire.DATA, wire.TAKEN, wire.FINISHED, wire.RESET})


class _Numbered(msgspec.Struct, frozen=True):
    conn: int


class TunnelParams(_Numbered, frozen=True):
    """The parameters of a notification about a tunnel; which are there depends on its method."""

    port: int = 0
    data: bytes = b""
    count: Annotated[int, Meta(ge=0)] = msgspec.field(name="bytes", default=0)


_decode_number = msgspec.json.Decoder(_Numbered).decode
_decode_params = msgspec.json.Decoder(TunnelParams).decode
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)

_Notify = Callable[[str, JsonObject], object]
_Start = Callable[[Callable[[], Coroutine[Any, Any, None]]], object]
_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError, DecathlonError)


class Tunnel(ByteStream):
    """One TCP connection as a byte stream, for one reader and one writer."""

    def __init__(self, number: int, notify: _Notify, on_close: Callable[[], object]) -> None:
        self.number = number
        self._notify = notify
        self._on_close = on_close
        # One buffer and no list of chunks: a driver that sends single bytes would multiply the window.
        self._buffer = bytearray()
        self._send_window_bytes = wire.WINDOW_BYTES
        self._eof_received = False
        self._eof_sent = False
        self._closed = False
        self._broken = False
        self._peer_gone = False
        self._changed = anyio.Event()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._buffer:
            if self._broken:
                raise anyio.BrokenResourceError
            if self._eof_received:
                raise anyio.EndOfStream
            await self._changed.wait()
        chunk = bytes(self._buffer[:max_bytes])
        del self._buffer[:max_bytes]
        self._send(wire.TAKEN, bytes=len(chunk))
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
            self._send(wire.DATA, data=base64.b64encode(remaining[:size]).decode())
            remaining = remaining[size:]

    async def send_eof(self) -> None:
        if not (self._eof_sent or self._broken):
            self._eof_sent = True
            self._send(wire.FINISHED)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._on_close()
        self.fail()
        if not self._peer_gone and not (self._eof_sent and self._eof_received):
            self._send(wire.RESET)

    def handle(self, method: str, params: TunnelParams) -> None:
        """Process one notification of the driver. Raises ValueError if it is invalid."""
        if method == wire.DATA:
            if len(self._buffer) + len(params.data) > wire.WINDOW_BYTES:
                raise ValueError("more data than its window")
            if self._eof_received:
                raise ValueError("data after the end")
            self._buffer += params.data
        elif method == wire.TAKEN:
            self._send_window_bytes = min(self._send_window_bytes + params.count, wire.WINDOW_BYTES)
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

    def _send(self, method: str, **params: object) -> None:
        self._notify(method, {"conn": self.number, **params})


class Tunnels:
    """The tunnels of one sandbox. None of them survives the stream that it was opened on."""

    def __init__(self, notify: _Notify, start: _Start) -> None:
        """`start` runs a function in a task that ends with the connection to the driver."""
        self._notify = notify
        self._start = start
        self._open: dict[int, Tunnel] = {}
        self._targets: Mapping[int, Dialer] = {}
        self._last_number = 0
        self._openings = TokenBucket(per_second=OPENINGS_PER_SECOND, burst=MAX_TUNNELS)
        # A driver that keeps the protocol has no more tunnels than this side, for more than a moment.
        self._refusals = TokenBucket(per_second=MAX_TUNNELS, burst=MAX_TUNNELS)

    def forward(self, targets: Mapping[int, Dialer]) -> None:
        """Connect tunnels that the driver opens for these ports to the targets, each in a task."""
        self._targets = {**self._targets, **targets}

    def create(self) -> Tunnel:
        """A tunnel for a connection that the driver is about to be asked for."""
        # Numbers of tunnels that this side opens are negative, the driver's are positive.
        self._last_number -= 1
        return self._add(self._last_number)

    def handle(self, method: str, params: bytes) -> None:
        """Process a notification of the driver with its params as JSON.

        It is ignored if it is invalid or for an unknown tunnel; invalid params break the tunnel if it has the
        tunnel's number.
        """
        if method not in TUNNEL_NOTIFICATIONS:
            return
        with suppress(*_UNREADABLE):
            number = _decode_number(params).conn
            if method == wire.OPENED:
                self._accept(number, _decode_params(params).port)
            elif (tunnel := self._open.get(number)) is not None:
                try:
                    tunnel.handle(method, _decode_params(params))
                except _UNREADABLE:
                    tunnel.fail()

    def close(self) -> None:
        """Break every tunnel, because the connection to the driver has ended."""
        for tunnel in tuple(self._open.values()):
            tunnel.fail()

    def _add(self, number: int) -> Tunnel:
        self._open[number] = tunnel = Tunnel(number, self._notify, lambda: self._open.pop(number, None))
        return tunnel

    def _accept(self, number: int, port: int) -> None:
        # A number of this side's would take the place of a tunnel that `create` makes later.
        if (dial := self._targets.get(port)) is None or number in self._open or number < 1:
            return
        if len(self._open) < MAX_TUNNELS and self._openings.take():
            self._start(partial(_connect, self._add(number), dial))
        elif self._refusals.take():
            # The driver would keep it open.
            self._notify(wire.RESET, {"conn": number})


def _tunnels_of(driver: DriverClient) -> Tunnels:
    if not isinstance(driver.channel, Tunnels):
        driver.channel = Tunnels(driver.notify, driver.spawn)
    return driver.channel


async def forward(driver: DriverClient, targets: Mapping[int, Dialer]) -> None:
    """Forward these ports of a sandbox's loopback to the targets.

    Raises DriverError with reason `network` if a port is taken.
    """
    _tunnels_of(driver).forward(targets)
    await driver.request(wire.FORWARD, {"ports": [*targets]})


async def dial(driver: DriverClient, port: int) -> ByteStream:
    """Connect to a port of a sandbox's loopback.

    Raises DriverError with reason `network` if nothing listens there.
    """
    tunnel = _tunnels_of(driver).create()
    try:
        await driver.request(wire.DIAL, {"port": port, "conn": tunnel.number})
    except BaseException:
        await aclose_forcefully(tunnel)
        raise
    return tunnel


async def resolve(driver: DriverClient) -> None:
    """Let every host name lead to a sandbox's loopback, for programs that ask its port 53.

    Raises DriverError with reason `network` if the driver may not listen there.
    """
    await driver.request(wire.RESOLVE, {})


async def _connect(tunnel: Tunnel, dial: Dialer) -> None:
    """Connect a tunnel to its target until both directions have ended or one is broken."""
    async with tunnel:
        with suppress(*_BROKEN, TimeoutError):
            with anyio.fail_after(DIAL_SECONDS):
                target = await dial()
            await relay(tunnel, target)


async def relay(tunnel: ByteStream, target: ByteStream) -> None:
    """Copy between two streams until both directions have ended; `target` is closed."""
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
                await aclose_forcefully(stream)
