"""JSON-RPC requests over the byte stream of a driver, one JSON object a line.

Nothing that the driver sends is trusted: lines and queues are bounded, and messages that belong to no pending
request are ignored.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import ByteStream
from decathlon_sandbox import wire
from pydantic_core import from_json

from decathlon_mcp.driver_client.tunnels import TUNNEL_NOTIFICATIONS, Tunnels
from decathlon_mcp.errors import CallTimeoutError, DriverError, LimitExceededError, SandboxLostError
from decathlon_mcp.types import JsonObject, as_json, as_object

SEND_SECONDS = 30.0
"""Time limit for writing one message; a driver that does not read for so long is lost."""
MAX_NOTIFICATIONS = 10_000
MAX_NOTIFICATIONS_BYTES = 8 << 20
"""Limits on the notifications queued for one request whose handler is slow; the oldest are dropped."""
MAX_ERROR_CHARACTERS = 4000

NotificationHandler = Callable[[JsonObject], Awaitable[None]]
"""Called with the params of one notification."""


class MessageStream:
    """Reads and writes JSON objects on a byte stream, one a line of at most `max_bytes`."""

    def __init__(self, stream: ByteStream, *, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
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
                raise SandboxLostError(f"the sandbox has not read its input for {SEND_SECONDS:.0f} s")

    async def messages(self) -> AsyncGenerator[tuple[JsonObject, int]]:
        """Yield every message with its size in bytes until the stream ends; other lines are ignored.

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
            if len(line) > self._max_bytes:
                raise LimitExceededError(f"the driver sent a line of more than {self._max_bytes} bytes")
            for next_line in next_lines:
                if (message := _parse(line)) is not None:
                    yield message, len(line)
                line = bytearray(next_line)


def _parse(line: bytearray) -> JsonObject | None:
    try:
        return as_object(from_json(line, allow_inf_nan=False))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class _Notification:
    method: str
    params: JsonObject
    size_bytes: int


@dataclass(slots=True)
class _PendingRequest:
    """A request without a reply so far, and the notifications that its handlers have not had yet."""

    changed: anyio.Event = field(default_factory=anyio.Event)
    notifications: deque[_Notification] = field(default_factory=deque[_Notification])
    queued_bytes: int = 0
    reply: JsonObject | None = None

    def push(self, notification: _Notification) -> None:
        self.notifications.append(notification)
        self.queued_bytes += notification.size_bytes
        while len(self.notifications) > MAX_NOTIFICATIONS or self.queued_bytes > MAX_NOTIFICATIONS_BYTES:
            self.pop()
        self.changed.set()

    def pop(self) -> _Notification:
        notification = self.notifications.popleft()
        self.queued_bytes -= notification.size_bytes
        return notification


class RpcClient:
    """Sends requests and notifications to a driver; `read` must run in a task of its own.

    Any number of requests may be pending. `describe_loss` builds the error for a connection that has closed;
    it gets the reason, None if the stream ended without one.
    """

    def __init__(
        self, stream: ByteStream, describe_loss: Callable[[str | None], Awaitable[SandboxLostError]]
    ) -> None:
        self._messages = MessageStream(stream, max_bytes=wire.MAX_LINE_BYTES)
        self._describe_loss = describe_loss
        self._ids = itertools.count(1)  # never used twice: a late reply must not match a newer request
        self._pending: dict[int, _PendingRequest] = {}
        self._close_reason: str | None = None
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
    ) -> Any:
        """Send a request and return its result.

        `handlers`, by notification method, are called in order with the notifications for this request.
        Raises DriverError, CallTimeoutError, SandboxLostError. On a time-out or cancellation the request is
        cancelled in the driver too.
        """
        number = next(self._ids)
        pending = self._pending[number] = _PendingRequest()
        replied = False
        try:
            await self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
            with anyio.move_on_after(timeout_seconds):
                reply = await self._wait(pending, handlers or {})
                replied = True
                return _result_of(reply)
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
            async for message, size_bytes in self._messages.messages():
                self._dispatch(message, size_bytes)
        except LimitExceededError as error:
            self.close(error.message)
        self.close()

    def close(self, reason: str | None = None) -> None:
        """End the connection; pending requests and tunnels fail. Only the first reason counts."""
        if not self.closed.is_set():
            self._close_reason = reason
            self.closed.set()
            self.ready_or_closed.set()
            for pending in self._pending.values():
                pending.changed.set()
            self.tunnels.close()

    async def closed_error(self) -> SandboxLostError:
        """The error that says why the connection has ended."""
        return await self._describe_loss(self._close_reason)

    async def _wait(
        self, pending: _PendingRequest, handlers: Mapping[str, NotificationHandler | None]
    ) -> JsonObject:
        while True:
            await pending.changed.wait()
            pending.changed = anyio.Event()
            while pending.notifications:
                notification = pending.pop()
                if (handler := handlers.get(notification.method)) is not None:
                    await handler(notification.params)
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
            self.close(error.message)
            raise await self.closed_error() from None

    async def _send_cancel(self, number: int) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._messages.send({"jsonrpc": "2.0", "method": wire.CANCEL, "params": {"id": number}})
            except SandboxLostError as error:
                self.close(error.message)

    def _dispatch(self, message: JsonObject, size_bytes: int) -> None:
        number = message.get("id")
        if isinstance(number, int):
            if (pending := self._pending.get(number)) is not None and pending.reply is None:
                pending.reply = message
                pending.changed.set()
            return
        method, params = message.get("method"), as_object(message.get("params")) or {}
        if not isinstance(method, str):
            return
        if method in (wire.PROGRESS, wire.MESSAGE):
            inner, number = as_object(params.get("params")), params.get("id")
            if inner is not None and isinstance(number, int) and (pending := self._pending.get(number)):
                pending.push(_Notification(method, inner, size_bytes))
        elif method in TUNNEL_NOTIFICATIONS:
            self.tunnels.handle(method, params)
        elif method == wire.READY:
            self.ready = True
            self.ready_or_closed.set()


def _result_of(reply: JsonObject) -> Any:
    """The result of a reply. Raises DriverError or CallTimeoutError for an error."""
    if "result" in reply:
        return reply["result"]
    error = as_object(reply.get("error")) or {}
    code, text, data = error.get("code"), error.get("message"), as_object(error.get("data"))
    reason = wire.REASONS.get(code, "driver_fault") if isinstance(code, int) else "driver_fault"
    message = text[:MAX_ERROR_CHARACTERS] if isinstance(text, str) and text else reason
    if reason == "timeout":
        raise CallTimeoutError(message)
    raise DriverError(message, reason=reason, **({"about": data} if data else {}))
