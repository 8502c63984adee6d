"""Messages to and from a driver, over the stream of its sandbox. A stream that was lost is opened again.

`decathlon_sandbox.resumable` keeps what the driver has not acknowledged and sends it again. Requests that are
pending while there is no stream just wait.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.lowlevel
from anyio import CancelScope
from anyio.abc import ByteStream
from decathlon_sandbox import wire
from decathlon_sandbox.resumable import (
    ACKNOWLEDGE_AFTER_SECONDS,
    CHUNK_BYTES,
    NONCE_DIGITS,
    OVERHEAD_BYTES,
    ConnectionFullError,
    Limits,
    ServerEnd,
)

from decathlon_mcp.background import Flag, Signal, background_tasks
from decathlon_mcp.driver_client.rates import TokenBucket
from decathlon_mcp.errors import LimitExceededError, ProviderUnavailableError, SandboxLostError
from decathlon_mcp.sandboxes.streams import DirectStream
from decathlon_mcp.types import JsonObject, as_json_with_raw

SEND_SECONDS = 30.0
"""Time limit for writing one message; a driver that does not read or acknowledge for so long is lost."""
ATTACH_SECONDS = 0.2
"""Shortest time between two attachments, because a driver can demand them."""
ANSWER_SECONDS = (2.0, 16.0)
"""How long the driver may take to answer an `attach` before the next one: at first, and after some of them. A
driver that boots on a busy machine takes long, and answers only the last one."""
REOPEN_SECONDS = (0.05, 2.0)
"""Time between attempts to open a stream: at first, and at most."""
DRAIN_SECONDS = 1.0
"""How long a stream that cannot be written to is still read."""
URGENT_BYTES = 64 << 10
"""Part of the send buffer for urgent messages: some hundred cancellations."""
READ_BYTES_PER_SECOND = 16 << 20
READ_BYTES_BURST = 64 << 20
LINE_COST_BYTES = 1 << 10
"""A driver that sends more than this is read slower, so that handling it takes a few per cent of the event
loop's time at most. A line counts as its length and LINE_COST_BYTES, because short lines cost most."""

_STREAM_ENDS = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


class StreamSource(Protocol):
    """The part of a `Sandbox` that the connection needs."""

    @property
    def stream(self) -> ByteStream: ...

    async def reopen(self) -> None:
        """See `Sandbox.reopen`."""
        ...


@dataclass(frozen=True, slots=True)
class Survival:
    """How a connection continues after the loss of a stream or of a server process.

    `seconds`: how long the driver waits for a server, and a server for a new stream; with 0, the end of the
    stream is the end. `generation`: higher than that of every server process before, from 1.
    """

    seconds: int = 0
    generation: int = 1


NO_SURVIVAL = Survival()


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a connection has closed.

    `reason`: None if the stream ended without one. `by_driver`: the stream was open, but the driver did not
    read, did not answer or violated the protocol. `cause`: why the sandbox ended, if the provider knows.
    """

    reason: str | None = None
    by_driver: bool = False
    cause: str | None = None


class _ViolationError(Exception):
    """The driver has violated the protocol."""


class StalledError(SandboxLostError):
    """The driver has not read its input, or acknowledged it, for too long."""


class MessageStream:
    """Sends and receives messages. `run` must run in a task of its own, and `attach` be called once.

    `max_read_bytes`: longest message of the driver. `taken_back`: the driver was started by another server
    process.
    """

    def __init__(
        self,
        source: StreamSource,
        *,
        max_read_bytes: int = wire.MAX_RESPONSE_BYTES,
        survival: Survival = NO_SURVIVAL,
        taken_back: bool = False,
    ) -> None:
        self.survival = survival
        self._source = source
        self._stream = source.stream
        self._end = ServerEnd(
            Limits(
                send_payload_bytes=wire.MAX_LINE_BYTES,
                send_buffer_bytes=wire.REQUEST_BUFFER_BYTES,
                receive_payload_bytes=max_read_bytes,
                receive_window_bytes=max(wire.RESPONSE_BUFFER_BYTES, max_read_bytes + OVERHEAD_BYTES),
            ),
            generation=survival.generation,
            survive_seconds=survival.seconds,
            # Requests are recognized by their ids, and the driver knows the rest.
            taken_back=taken_back,
        )
        self._reading = TokenBucket(per_second=READ_BYTES_PER_SECOND, burst=READ_BYTES_BURST)
        self._scope: CancelScope | None = None
        self._receive_scope: CancelScope | None = None
        self._loss: Loss | None = None
        self._closed = False
        self._is_writing = False
        # What a stream did not take at once, for `_maintain`; until it is written, `_is_writing` is set.
        self._unwritten: tuple[ByteStream, bytes] | None = None
        # The stream. It is broken if it cannot be written to, and still read.
        self._is_open = True
        self._is_broken = False
        self._may_attach = False
        self._was_attached = taken_back
        self._attached_at = self._unanswered_since = -math.inf
        self._answer_seconds, self._reopen_seconds = ANSWER_SECONDS[0], REOPEN_SECONDS[0]
        self._detached_at: float | None = time.monotonic()
        self._detached_seconds = 0.0
        # Wakes `_maintain`, and senders that wait for room.
        self._work = Signal()
        self._room = Flag()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._late: asyncio.TimerHandle | None = None
        self._waiting_senders = 0

    def detached_seconds(self) -> float:
        """For how long, in all, the driver has not been attached."""
        current = 0.0 if self._detached_at is None else time.monotonic() - self._detached_at
        return self._detached_seconds + current

    async def send(self, message: JsonObject, *, urgent: bool = False) -> None:
        """Send one message; a cancelled call sends all of it or nothing.

        It may contain `msgspec.Raw` without line feeds. Waits while too much is not acknowledged; `urgent`
        messages have some room of their own. Raises LimitExceededError for a message that is too long, and
        SandboxLostError if the sandbox is gone or the driver does not read.
        """
        payload = as_json_with_raw(message)
        if len(payload) > wire.MAX_LINE_BYTES:
            raise LimitExceededError(
                f"a message of {len(payload)} bytes exceeds the limit of {wire.MAX_LINE_BYTES} bytes"
            )
        reserved_bytes = OVERHEAD_BYTES + (0 if urgent else URGENT_BYTES)
        if not self._has_room(len(payload), reserved_bytes):
            await self._wait_for_room(len(payload), reserved_bytes)
        if self._closed:
            raise SandboxLostError("the sandbox is gone")
        try:
            self._end.send(payload)
        except ConnectionFullError as error:
            # Not for lack of room: to a new server process, the driver has named the highest number.
            raise StalledError(f"the driver violated the protocol: {error}") from None
        await self._write()

    def encode(self, message: JsonObject, *, urgent: bool = False) -> bytes | None:
        """The payload of a message that can be sent without waiting; None if that is not possible now."""
        if self._closed:
            return None
        payload = as_json_with_raw(message)
        reserved_bytes = OVERHEAD_BYTES + (0 if urgent else URGENT_BYTES)
        fits = len(payload) <= wire.MAX_LINE_BYTES and self._has_room(len(payload), reserved_bytes)
        return payload if fits else None

    def send_now(self, payload: bytes) -> None:
        """Send what `encode` has just returned. What the stream does not take at once, `run` writes."""
        try:
            self._end.send(payload)
        except ConnectionFullError as error:
            self._lose(StalledError(f"the driver violated the protocol: {error}"))
            return
        stream = self._stream
        if self._is_writing or not self._is_open or self._is_broken:
            return
        if not isinstance(stream, DirectStream):
            self._work.set()
            return
        data = self._end.data_to_send()
        if not data:
            return  # not attached
        try:
            sent_bytes = stream.send_now(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._is_broken = True
            self._work.set()
            return
        if sent_bytes < len(data):
            self._is_writing, self._unwritten = True, (stream, data[sent_bytes:])
            self._work.set()
        elif len(data) >= CHUNK_BYTES:
            self._work.set()  # there may be more

    async def send_bytes(self, data: bytes) -> None:
        """Write bytes that are no message, such as the driver's source. Raises SandboxLostError."""
        await self._write_bytes(data)
        if self._is_broken:
            raise SandboxLostError("the sandbox is gone")

    def attach(self) -> None:
        """Begin to attach to the driver, whose source has been written."""
        self._may_attach = True
        self._work.set()

    def acknowledge(self, number: int) -> None:
        """Let the driver forget a message."""
        self._end.acknowledge(number)
        if self._end.acknowledgement_due:
            self._work.set()
        elif self._late is None and self._loop is not None and self._end.acknowledgement_pending:
            # A timer, because `_maintain` would be woken after each reply. Mostly, a message comes first.
            self._late = self._loop.call_later(ACKNOWLEDGE_AFTER_SECONDS, self._acknowledge_late)

    def close(self) -> None:
        """End the connection: `run` returns, and nothing is sent any more."""
        self._closed = True
        if self._late is not None:
            self._late.cancel()
        self._cancel(self._scope)
        self._wake_senders()

    async def run(
        self, on_message: Callable[[int, bytes], object], on_attached: Callable[[], object]
    ) -> Loss:
        """Receive until the connection has ended; returns why.

        `on_message` gets every message with its number, for `acknowledge`. `on_attached` is called whenever
        the driver has been attached, before the messages that come with it.
        """
        self._loop = asyncio.get_running_loop()
        with CancelScope() as self._scope:
            self._cancel(self._scope if self._closed else None)
            async with background_tasks() as tasks:
                tasks.start_soon(self._run_until_lost, self._maintain)
                while self._loss is None:
                    with CancelScope() as self._receive_scope:
                        await self._receive(on_message, on_attached)
                    if self._loss is None:
                        self._loss = await self._reopen()
        return self._loss or Loss()

    # receiving

    async def _receive(
        self, on_message: Callable[[int, bytes], object], on_attached: Callable[[], object]
    ) -> None:
        """Receive until the stream ends or the driver violates the protocol."""
        end, stream = self._end, self._stream

        def handle(chunk: bytes) -> float:
            """Handle what has arrived; returns for how long nothing is to be read. Raises _ViolationError."""
            was_attached, unacknowledged_bytes = end.attached, end.unacknowledged_bytes
            messages = end.receive(chunk)
            if end.attached and not was_attached:
                self._on_attached()
                on_attached()
            for number, payload in messages:
                on_message(number, payload)
            if end.failure is not None:
                raise _ViolationError(end.failure)
            if end.attach_due:
                self._work.set()
            if end.unacknowledged_bytes < unacknowledged_bytes:
                self._wake_senders()
            return self._reading.spend(len(chunk) + LINE_COST_BYTES * chunk.count(b"\n"))

        try:
            if isinstance(stream, DirectStream):
                await stream.receive_each(handle)
            else:
                while True:
                    if seconds := handle(await stream.receive(1 << 16)):
                        await anyio.sleep(seconds)
        except _STREAM_ENDS:
            return
        except _ViolationError as violation:
            self._loss = self._violation(str(violation))

    def _violation(self, failure: str) -> Loss:
        if self._end.was_replaced:
            return Loss("another server process has taken the driver over")
        return Loss(f"the driver violated the protocol: {failure}", by_driver=True)

    def _on_attached(self) -> None:
        self._was_attached = True
        self._unanswered_since = -math.inf
        self._answer_seconds, self._reopen_seconds = ANSWER_SECONDS[0], REOPEN_SECONDS[0]
        if self._detached_at is not None:
            self._detached_seconds += time.monotonic() - self._detached_at
            self._detached_at = None
        self._work.set()
        self._wake_senders()

    def _on_detached(self) -> None:
        if self._detached_at is None:
            self._detached_at = time.monotonic()

    async def _reopen(self) -> Loss | None:
        """Open the stream again; returns why that is not possible."""
        was_attached = self._end.attached
        self._end.stream_lost()
        self._is_open = self._is_broken = False
        self._on_detached()
        self._wake_senders()
        if not self.survival.seconds:
            return Loss()
        assert self._detached_at is not None
        deadline = self._detached_at + self.survival.seconds
        while time.monotonic() < deadline:
            if not was_attached:
                await anyio.sleep(self._reopen_seconds)
                self._reopen_seconds = min(2 * self._reopen_seconds, REOPEN_SECONDS[1])
            was_attached = False
            try:
                with anyio.move_on_after(deadline - time.monotonic()):
                    await self._source.reopen()
            except ProviderUnavailableError:
                continue
            except SandboxLostError as error:
                cause = error.data.get("cause")
                return Loss(error.message, cause=cause if isinstance(cause, str) else None)
            else:
                self._stream = self._source.stream
                self._is_open = True
                self._unanswered_since = -math.inf
                self._work.set()
                return None
        return Loss(f"its stream could not be opened again within {self.survival.seconds} s")

    # sending

    def _has_room(self, payload_bytes: int, reserved_bytes: int) -> bool:
        used_bytes = self._end.unacknowledged_bytes + payload_bytes + reserved_bytes
        return used_bytes <= wire.REQUEST_BUFFER_BYTES and payload_bytes <= self._end.room_bytes

    async def _wait_for_room(self, payload_bytes: int, reserved_bytes: int) -> None:
        """Wait until a message fits. Raises StalledError after SEND_SECONDS without an acknowledgement."""
        remaining_seconds = SEND_SECONDS
        while not (self._closed or self._has_room(payload_bytes, reserved_bytes)):
            unacknowledged_bytes = self._end.unacknowledged_bytes
            is_attached, began_at = self._end.attached, time.monotonic()
            self._waiting_senders += 1
            try:
                with anyio.move_on_after(remaining_seconds if is_attached else None):
                    await self._room.wait()
            finally:
                self._waiting_senders -= 1
            if self._end.unacknowledged_bytes < unacknowledged_bytes:
                remaining_seconds = SEND_SECONDS
            elif is_attached:
                remaining_seconds -= time.monotonic() - began_at
            if remaining_seconds <= 0:
                raise StalledError(f"the driver has not acknowledged its input for {SEND_SECONDS:.0f} s")

    def _wake_senders(self) -> None:
        if self._waiting_senders:
            self._room.set()
            self._room = Flag()

    async def _write(self) -> None:
        """Write what there is, unless another task does. Raises SandboxLostError."""
        if self._is_writing:
            return
        self._is_writing = True
        try:
            while self._is_open and not self._is_broken and (data := self._end.data_to_send()):
                await self._write_bytes(data)
                if len(data) >= CHUNK_BYTES:
                    # Between lines. The rest is written by `_maintain`.
                    await anyio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            self._work.set()
            raise
        finally:
            self._is_writing = False

    async def _write_rest(self, stream: ByteStream, rest: bytes) -> None:
        """Write what `send_now` could not. Raises StalledError."""
        try:
            if stream is self._stream and self._is_open and not self._is_broken:
                await self._write_bytes(rest)
        finally:
            self._unwritten, self._is_writing = None, False

    async def _write_bytes(self, data: bytes) -> None:
        stream, is_stalled = self._stream, False
        try:
            if isinstance(stream, DirectStream):
                # Mostly there is room for all of it, and a cancel scope costs more than writing.
                data = data[stream.send_now(data) :]
            if data:
                # Shielded: after a part of a line, everything would have to be sent again.
                with anyio.move_on_after(SEND_SECONDS, shield=True) as scope:
                    await stream.send(data)
                is_stalled = scope.cancelled_caught
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            # Its end, which says more, is still to be read.
            if stream is self._stream:
                self._is_broken = True
                self._work.set()
        if is_stalled and stream is self._stream:
            raise StalledError(f"the sandbox has not read its input for {SEND_SECONDS:.0f} s")

    # what has to be done without a request

    async def _run_until_lost(self, function: Callable[[], Awaitable[None]]) -> None:
        try:
            await function()
        except SandboxLostError as error:
            self._lose(error)

    def _lose(self, error: SandboxLostError) -> None:
        self._loss = Loss(error.message, by_driver=isinstance(error, StalledError))
        self._cancel(self._scope)

    async def _maintain(self) -> None:
        """Attach, and write what is left."""
        while True:
            await self._next_work()
            if self._unwritten is not None:
                await self._write_rest(*self._unwritten)
            if self._is_broken:
                await self._drop_broken_stream()
            elif not self._is_open or not self._may_attach:
                pass
            elif not self._end.attached or self._end.attach_due:
                await self._attach()
            else:
                await self._write()

    def _acknowledge_late(self) -> None:
        """Acknowledge what no message has acknowledged for a while."""
        self._late = None
        if self._end.acknowledgement_pending:
            self._end.acknowledge_now()
            self._work.set()

    @staticmethod
    def _cancel(scope: CancelScope | None) -> None:
        if scope is not None:
            scope.cancel()

    async def _next_work(self) -> None:
        await self._work.wait()

    async def _drop_broken_stream(self) -> None:
        """End a stream that cannot be written to, after what can still be read."""
        with anyio.move_on_after(DRAIN_SECONDS):
            while self._is_broken:
                await self._next_work()
        if self._is_broken:
            self._cancel(self._receive_scope)

    async def _attach(self) -> None:
        """Attach once, and wait for the answer. Raises StalledError."""
        stream = self._stream
        # Everything unacknowledged is sent again, which costs as much as reading it.
        resent_seconds = self._reading.spend(self._end.unacknowledged_bytes if self._was_attached else 0)
        await anyio.sleep(max(resent_seconds, self._attached_at + ATTACH_SECONDS - time.monotonic()))
        self._attached_at = time.monotonic()
        if self._unanswered_since < 0:
            self._unanswered_since = self._attached_at
        self._on_detached()
        self._end.attach(secrets.token_hex(NONCE_DIGITS // 2))
        await self._write()
        with anyio.move_on_after(self._answer_seconds):
            while stream is self._stream and self._is_open and not (self._end.attached or self._is_broken):
                await self._next_work()
        self._work.set()
        if stream is self._stream and self._is_open and not (self._end.attached or self._is_broken):
            self._answer_seconds = min(2 * self._answer_seconds, ANSWER_SECONDS[1])
            # The first time, the driver has BOOT_SECONDS.
            if self._was_attached and time.monotonic() > self._unanswered_since + wire.LEASE_SECONDS:
                raise StalledError(f"the driver has not answered for {wire.LEASE_SECONDS:.0f} s")
