"""JSON-RPC requests over the byte stream of a driver, one JSON object a line.

Nothing that the driver sends is trusted: the length of a line, its depth and number of values, the queues and
the rates are bounded, and messages that belong to no pending request are ignored. A line is decoded only in
its envelope; results and parameters stay bytes until their limits have been checked.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
from anyio.abc import ByteStream
from decathlon_sandbox import wire
from msgspec import UNSET, Raw, UnsetType

from decathlon_mcp.driver_client.rates import TokenBucket
from decathlon_mcp.driver_client.tunnels import TUNNEL_NOTIFICATIONS, Tunnels
from decathlon_mcp.errors import CallTimeoutError, DriverError, LimitExceededError, SandboxLostError
from decathlon_mcp.json_limits import check_json
from decathlon_mcp.types import JsonObject, as_json, as_object

SEND_SECONDS = 30.0
"""Time limit for writing one message; a driver that does not read for so long is lost."""
MAX_NOTIFICATIONS = 1_000
MAX_NOTIFICATIONS_BYTES = 1 << 20
"""Limits on the notifications queued for one request whose handler is slow; the oldest are dropped."""
NOTIFICATIONS_PER_SECOND = 2 * wire.NOTIFICATIONS_PER_SECOND
NOTIFICATIONS_BURST = 2 * wire.NOTIFICATIONS_BURST
"""Limits on the notifications of one sandbox that are passed on; the driver itself keeps half of it."""
NOTIFICATION_BYTES_PER_SECOND = 1 << 20
NOTIFICATION_BYTES_BURST = 8 << 20
READ_BYTES_PER_SECOND = 16 << 20
READ_BYTES_BURST = 64 << 20
LINE_COST_BYTES = 1 << 10
"""A driver that sends more than this is read slower, so that handling it takes a few per cent of the event
loop's time at most. A line counts as its length and LINE_COST_BYTES, because short lines cost most."""
MAX_ERROR_CHARACTERS = 4000
MAX_ERROR_BYTES = 1 << 17
"""Longest error object of a driver that is read; a longer one loses its message and its data."""
MAX_SMALL_NODES = 1_000
"""Values and keys in an error, and in the result of a method without a limit of its own."""
MAX_NOTIFICATION_NODES = 10_000
MAX_DEPTH = 128
"""Depth of a result; the driver refuses replies of the task's servers that are deeper than 120."""

NotificationHandler = Callable[[JsonObject], Awaitable[None]]
"""Called with the params of one notification."""

# The driver writes the id of a reply first. Used for lines that cannot be read.
_REPLY_ID = re.compile(rb'\{"jsonrpc":"2\.0","id":(\d{1,18}),')
_INTEGER = re.compile(rb"-?\d{1,18}")


class Message(msgspec.Struct, frozen=True):
    """The envelope of a line. `overlong` belongs to a reply that the driver has shortened."""

    id: Raw | UnsetType = UNSET
    method: str | UnsetType = UNSET
    params: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET
    overlong: Raw | UnsetType = UNSET


class _CallParams(msgspec.Struct, frozen=True):
    """The parameters of `progress` and `message`."""

    id: Raw | UnsetType = UNSET
    params: Raw | UnsetType = UNSET


_decode_message = msgspec.json.Decoder(Message).decode
_decode_call_params = msgspec.json.Decoder(_CallParams).decode
# A Raw is not checked for valid UTF-8 and msgspec's errors are no ValueErrors.
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


def read_message(line: bytes) -> Message | None:
    """The envelope of a line; None for a line that is no JSON object."""
    try:
        return _decode_message(line)
    except _UNREADABLE:
        return None


def decode_bounded(data: bytes | Raw, *, max_nodes: int = MAX_SMALL_NODES) -> Any:
    """Decode JSON with at most that many values and keys and at most MAX_DEPTH levels.

    Raises ValueError if it exceeds a limit (JsonLimitError) or is not valid.
    """
    data = bytes(data)
    check_json(data, max_depth=MAX_DEPTH, max_nodes=max_nodes)
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


class MessageStream:
    """Writes JSON objects to a byte stream, one a line of at most `max_bytes`, and reads lines.

    `max_read_bytes` is the limit for lines that are read, by default the same.
    """

    def __init__(self, stream: ByteStream, *, max_bytes: int, max_read_bytes: int | None = None) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._max_read_bytes = max_bytes if max_read_bytes is None else max_read_bytes
        self._send_lock = anyio.Lock(fast_acquire=True)

    async def send(self, message: JsonObject) -> None:
        """Write one message; a cancelled call writes all of it or nothing.

        Raises LimitExceededError for a message that is too long, and SandboxLostError if the other end is
        gone or does not read.
        """
        data = as_json(message) + b"\n"
        if len(data) > self._max_bytes:
            raise LimitExceededError(
                f"a message of {len(data)} bytes exceeds the limit of {self._max_bytes} bytes"
            )
        await self.send_bytes(data)

    async def send_bytes(self, data: bytes) -> None:
        """Write bytes as they are. Raises SandboxLostError as `send` does."""
        async with self._send_lock:
            # Shielded: half a message would corrupt every message after it.
            with anyio.move_on_after(SEND_SECONDS, shield=True) as scope:
                try:
                    await self._stream.send(data)
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    raise SandboxLostError("the sandbox is gone") from None
            if scope.cancelled_caught:
                raise StalledError(f"the sandbox has not read its input for {SEND_SECONDS:.0f} s")

    async def lines(self) -> AsyncGenerator[bytes]:
        """Yield every line, without its end, until the stream ends; an unfinished last line is dropped.

        Raises LimitExceededError for a line that is too long.
        """
        line = bytearray()
        while True:
            try:
                chunk = await self._stream.receive(1 << 16)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return
            rest, *next_lines = chunk.split(b"\n")
            line += rest
            if len(line) > self._max_read_bytes:
                raise LimitExceededError(f"the driver sent a line of more than {self._max_read_bytes} bytes")
            for next_line in next_lines:
                yield bytes(line)
                line = bytearray(next_line)


@dataclass(frozen=True, slots=True)
class _Notification:
    """A notification for one request; `params` is JSON."""

    method: str
    params: bytes


@dataclass(slots=True)
class _PendingRequest:
    """A request without a reply so far, and the notifications that its handlers have not had yet."""

    changed: anyio.Event = field(default_factory=anyio.Event)
    notifications: deque[_Notification] = field(default_factory=deque[_Notification])
    queued_bytes: int = 0
    reply: Message | None = None

    def push(self, notification: _Notification) -> None:
        self.notifications.append(notification)
        self.queued_bytes += len(notification.params)
        while len(self.notifications) > MAX_NOTIFICATIONS or self.queued_bytes > MAX_NOTIFICATIONS_BYTES:
            self.pop()
        self.changed.set()

    def pop(self) -> _Notification:
        notification = self.notifications.popleft()
        self.queued_bytes -= len(notification.params)
        return notification


class StalledError(SandboxLostError):
    """The driver has not read its input for too long."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a connection has closed.

    `reason`: None if the stream ended without one. `by_driver`: the stream was open, but the driver did not
    read, did not answer or violated the protocol.
    """

    reason: str | None = None
    by_driver: bool = False


class RpcClient:
    """Sends requests and notifications to a driver; `read` must run in a task of its own.

    Any number of requests may be pending. `describe_loss` builds the error for a connection that has closed.
    `max_read_bytes`: longest line of the driver; a longer one closes the connection.
    """

    def __init__(
        self,
        stream: ByteStream,
        describe_loss: Callable[[Loss], Awaitable[SandboxLostError]],
        *,
        max_read_bytes: int = wire.MAX_RESPONSE_BYTES,
    ) -> None:
        self._messages = MessageStream(stream, max_bytes=wire.MAX_LINE_BYTES, max_read_bytes=max_read_bytes)
        self._reading = TokenBucket(per_second=READ_BYTES_PER_SECOND, burst=READ_BYTES_BURST)
        self._notification_count = TokenBucket(per_second=NOTIFICATIONS_PER_SECOND, burst=NOTIFICATIONS_BURST)
        self._notification_bytes = TokenBucket(
            per_second=NOTIFICATION_BYTES_PER_SECOND, burst=NOTIFICATION_BYTES_BURST
        )
        self._describe_loss = describe_loss
        self._ids = itertools.count(1)  # never used twice: a late reply must not match a newer request
        self._pending: dict[int, _PendingRequest] = {}
        self._loss = Loss()
        self.tunnels = Tunnels(self.notify)
        self.ready = False
        """True once the driver has started."""
        self.ready_or_closed = anyio.Event()
        """Set once the driver has started or never will."""
        self.closed = anyio.Event()
        """Set once the connection has ended."""

    async def request(
        self,
        method: str,
        params: JsonObject,
        *,
        timeout_seconds: float | None = None,
        handlers: Mapping[str, NotificationHandler | None] | None = None,
        max_nodes: int = MAX_SMALL_NODES,
    ) -> Any:
        """Send a request and return its result, of at most `max_nodes` values and keys.

        `handlers` as for `request_message`. Raises DriverError (with reason `invalid_reply` for a result that
        exceeds a limit or is not JSON), CallTimeoutError, SandboxLostError.
        """
        message = await self.request_message(
            method, params, timeout_seconds=timeout_seconds, handlers=handlers
        )
        assert not isinstance(message.result, UnsetType)
        try:
            return decode_bounded(message.result, max_nodes=max_nodes)
        except ValueError as error:
            raise DriverError(
                f"the driver sent an invalid reply to {method}: {error}", reason="invalid_reply"
            ) from None

    async def request_message(
        self,
        method: str,
        params: JsonObject,
        *,
        timeout_seconds: float | None = None,
        handlers: Mapping[str, NotificationHandler | None] | None = None,
        request_id: int | None = None,
        before_send: Callable[[int], None] | None = None,
    ) -> Message:
        """Send a request and return the reply, which has a `result` that has not been checked.

        `handlers`, by notification method, are called in order with the notifications for this request.
        Raises DriverError, CallTimeoutError, SandboxLostError. On a time-out or cancellation the request is
        cancelled in the driver too.
        """
        number = next(self._ids) if request_id is None else request_id
        if before_send is not None:
            before_send(number)
        pending = self._pending[number] = _PendingRequest()
        replied = False
        try:
            await self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
            with anyio.move_on_after(timeout_seconds):
                reply = await self._wait(pending, handlers or {})
                replied = True
                _raise_error(reply)
                return reply
            raise CallTimeoutError(
                f"no answer to {method} within {timeout_seconds:g} s", seconds=timeout_seconds
            )
        finally:
            del self._pending[number]
            if not replied and not self.closed.is_set():
                await self._send_cancel(number)

    async def notify(self, method: str, params: JsonObject) -> None:
        """Send a notification. Raises SandboxLostError."""
        await self._send({"jsonrpc": "2.0", "method": method, "params": params})

    async def send_bytes(self, data: bytes) -> None:
        """Write bytes that are no message, such as the driver's source. Raises SandboxLostError."""
        await self._messages.send_bytes(data)

    async def read(self) -> None:
        """Dispatch incoming messages until the stream ends."""
        try:
            async for line in self._messages.lines():
                self._dispatch(line)
                if seconds := self._reading.spend(len(line) + LINE_COST_BYTES):
                    await anyio.sleep(seconds)
        except LimitExceededError as error:
            self.close(error.message, by_driver=True)
        self.close()

    def close(self, reason: str | None = None, *, by_driver: bool = False) -> None:
        """End the connection; pending requests and tunnels fail. Only the first reason counts.

        `by_driver`: see `Loss`.
        """
        if not self.closed.is_set():
            self._loss = Loss(reason, by_driver)
            self.closed.set()
            self.ready_or_closed.set()
            for pending in self._pending.values():
                pending.changed.set()
            self.tunnels.close()

    async def closed_error(self) -> SandboxLostError:
        """The error that says why the connection has ended."""
        return await self._describe_loss(self._loss)

    async def _wait(
        self, pending: _PendingRequest, handlers: Mapping[str, NotificationHandler | None]
    ) -> Message:
        while True:
            await pending.changed.wait()
            pending.changed = anyio.Event()
            while pending.notifications:
                notification = pending.pop()
                handler = handlers.get(notification.method)
                if handler is not None and (params := _notification_params(notification)) is not None:
                    await handler(params)
            # After the notifications: those that came before the reply are delivered before it.
            if pending.reply is not None:
                return pending.reply
            if self.closed.is_set():
                raise await self.closed_error()

    async def _send(self, message: JsonObject) -> None:
        if self.closed.is_set():
            raise await self.closed_error()
        try:
            await self._messages.send(message)
        except SandboxLostError as error:
            self.close(error.message, by_driver=isinstance(error, StalledError))
            raise await self.closed_error() from None

    async def _send_cancel(self, number: int) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._messages.send({"jsonrpc": "2.0", "method": wire.CANCEL, "params": {"id": number}})
            except SandboxLostError as error:
                self.close(error.message, by_driver=isinstance(error, StalledError))

    def _dispatch(self, line: bytes) -> None:
        message = read_message(line)
        if message is None:
            if match := _REPLY_ID.match(line):
                self._resolve(int(match.group(1)), Message())
        elif not isinstance(message.id, UnsetType):
            self._dispatch_reply(message, bytes(message.id))
        elif not isinstance(message.method, UnsetType):
            self._dispatch_notification(message.method, message.params)

    def _dispatch_reply(self, message: Message, number: bytes) -> None:
        # Only an integer is an id that was sent: `true == 1` in Python, and 1.0 too.
        if _INTEGER.fullmatch(number):
            self._resolve(int(number), message)
        elif number == b"null" and not isinstance(message.error, UnsetType):
            # The driver could not read a request and does not know which one.
            for pending in tuple(self._pending):
                self._resolve(pending, message)

    def _resolve(self, number: int, message: Message) -> None:
        if (pending := self._pending.get(number)) is not None and pending.reply is None:
            pending.reply = message
            pending.changed.set()

    def _dispatch_notification(self, method: str, params: Raw | UnsetType) -> None:
        if method == wire.READY:
            self.ready = True
            self.ready_or_closed.set()
        elif isinstance(params, UnsetType):
            return
        elif method in (wire.PROGRESS, wire.MESSAGE):
            self._queue_notification(method, params)
        elif method in TUNNEL_NOTIFICATIONS:
            self.tunnels.handle(method, bytes(params))

    def _queue_notification(self, method: str, params: Raw) -> None:
        try:
            outer = _decode_call_params(params)
        except _UNREADABLE:
            return
        if isinstance(outer.id, UnsetType) or isinstance(outer.params, UnsetType):
            return
        number, inner = bytes(outer.id), bytes(outer.params)
        pending = self._pending.get(int(number)) if _INTEGER.fullmatch(number) else None
        if (
            pending is not None
            and len(inner) <= wire.MAX_NOTIFICATION_BYTES
            and self._notification_count.take()
            and self._notification_bytes.take(len(inner))
        ):
            pending.push(_Notification(method, inner))


def _notification_params(notification: _Notification) -> JsonObject | None:
    try:
        return as_object(decode_bounded(notification.params, max_nodes=MAX_NOTIFICATION_NODES))
    except ValueError:
        return None


def _raise_error(reply: Message) -> None:
    """Raise DriverError or CallTimeoutError for a reply that is not just a result."""
    if isinstance(reply.error, UnsetType):
        if isinstance(reply.result, UnsetType):
            raise DriverError("the driver sent a reply that cannot be read", reason="invalid_reply")
        return
    error: JsonObject = {}
    if len(raw := bytes(reply.error)) <= MAX_ERROR_BYTES:
        with suppress(ValueError):
            error = as_object(decode_bounded(raw)) or {}
    code, text, data = error.get("code"), error.get("message"), as_object(error.get("data"))
    # A bool is an int, and `true` would be code 1.
    reason = wire.REASONS.get(code, "driver_fault") if type(code) is int else "driver_fault"
    message = text[:MAX_ERROR_CHARACTERS] if isinstance(text, str) and text else reason
    if reason == "timeout":
        raise CallTimeoutError(message)
    raise DriverError(message, reason=reason, **({"about": data} if data else {}))
