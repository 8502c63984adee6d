"""JSON-RPC requests to a driver.

Nothing that the driver sends is trusted: the length of a message, its depth and number of values, the queues
and the rates are bounded, and messages that belong to no pending request are ignored. A message is decoded
only in its envelope; results and parameters stay bytes until their limits have been checked.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
from decathlon_sandbox import wire
from msgspec import UNSET, Raw, UnsetType

from decathlon_mcp.background import Flag, Signal
from decathlon_mcp.driver_client.messages import Loss, MessageStream, StalledError
from decathlon_mcp.driver_client.rates import TokenBucket
from decathlon_mcp.driver_client.tunnels import TUNNEL_NOTIFICATIONS, Tunnels
from decathlon_mcp.errors import CallTimeoutError, DriverError, SandboxLostError
from decathlon_mcp.json_limits import check_json
from decathlon_mcp.types import JsonObject, as_object

CANCEL_SECONDS = 5.0
"""How long a cancelled request waits for room for the message that cancels it in the driver."""
MAX_NOTIFICATIONS = 1_000
MAX_NOTIFICATIONS_BYTES = 1 << 20
"""Limits on the notifications queued for one request whose handler is slow; the oldest are dropped."""
NOTIFICATIONS_PER_SECOND = 2 * wire.NOTIFICATIONS_PER_SECOND
NOTIFICATIONS_BURST = 2 * wire.NOTIFICATIONS_BURST
"""Limits on the notifications of one sandbox that are passed on; the driver itself keeps half of it."""
NOTIFICATION_BYTES_PER_SECOND = 1 << 20
NOTIFICATION_BYTES_BURST = 8 << 20
MAX_ERROR_CHARACTERS = 4000
MAX_ERROR_BYTES = 1 << 17
"""Longest error object of a driver that is read; a longer one loses its message and its data."""
MAX_SMALL_NODES = 1_000
"""Values and keys in an error, and in the result of a method without a limit of its own."""
MAX_NOTIFICATION_NODES = 10_000
READ_IN_THREAD_BYTES = 1 << 18
"""Replies from this length on are decoded and checked in a thread. In all, that takes up to 50 ms for 4 MiB,
but no single step keeps the event loop waiting for longer than 10 ms."""
MAX_SERVERS = 1_000
MAX_SERVER_CHARACTERS = 1_000
"""Limits on the names of servers whose tools have changed."""
MAX_DEPTH = 128
"""Depth of a result; the driver refuses replies of the task's servers that are deeper than 120."""

NotificationHandler = Callable[[JsonObject], Awaitable[None]]
"""Called with the params of one notification."""
T = TypeVar("T")

# The driver writes the id of a reply first. Used for long replies, and for lines that cannot be read.
_REPLY_ID = re.compile(rb'\{"jsonrpc":"2\.0","id":(\d{1,18}),')
_INTEGER = re.compile(rb"-?\d{1,18}")


class Message(msgspec.Struct, frozen=True):
    """The envelope of a message. `overlong` belongs to a reply that the driver has shortened."""

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


def read_message(payload: bytes) -> Message | None:
    """The envelope of a message; None for one that is no JSON object."""
    try:
        return _decode_message(payload)
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


@dataclass(frozen=True, slots=True)
class _Notification:
    """A notification for one request; `params` is JSON."""

    method: str
    params: bytes


class _Reply(msgspec.Struct, frozen=True):
    """A reply; a long one has not been decoded. `number` is that of its message, None if acknowledged."""

    message: Message | bytes
    number: int | None

    @property
    def is_long(self) -> bool:
        return not isinstance(self.message, Message)

    def read(self, read: Callable[[Message], T]) -> T:
        """What `read` makes of the result. Raises its errors, DriverError, CallTimeoutError."""
        message = self.message
        if not isinstance(message, Message):
            message = read_message(message) or Message()
        _raise_error(message)
        return read(message)


class _PendingRequest(msgspec.Struct, eq=False):
    """A request without a reply so far, and the notifications that its handlers have not had yet."""

    changed: Signal = msgspec.field(default_factory=Signal)
    notifications: deque[_Notification] = msgspec.field(default_factory=deque[_Notification])
    queued_bytes: int = 0
    reply: _Reply | None = None
    on_change: Callable[[], object] | None = None
    """Called instead of setting `changed`, while no task waits for it."""

    def notify(self) -> None:
        """There is a reply, a notification, or no connection any more."""
        if self.on_change is not None:
            self.on_change()
        else:
            self.changed.set()

    def push(self, notification: _Notification) -> None:
        self.notifications.append(notification)
        self.queued_bytes += len(notification.params)
        while len(self.notifications) > MAX_NOTIFICATIONS or self.queued_bytes > MAX_NOTIFICATIONS_BYTES:
            self.pop()
        self.notify()

    def pop(self) -> _Notification:
        notification = self.notifications.popleft()
        self.queued_bytes -= len(notification.params)
        return notification


class ChangedServers:
    """The servers that announced other tools, until their names are taken."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._added = Signal()

    def add(self, params: bytes) -> None:
        """Add the server of a `changed` notification."""
        try:
            name = (as_object(decode_bounded(params)) or {}).get("server")
        except ValueError:
            return
        if isinstance(name, str) and len(name) <= MAX_SERVER_CHARACTERS and len(self._names) < MAX_SERVERS:
            self._names.add(name)
            self._added.set()

    async def take(self) -> set[str]:
        """The names since the last call; waits until there is one."""
        while not self._names:
            await self._added.wait()
        names, self._names = self._names, set()
        return names


class RpcClient:
    """Sends requests and notifications to a driver; `read` must run in a task of its own.

    Any number of requests may be pending. `describe_loss` builds the error for a connection that has closed.
    `unanswered`: ids of requests of earlier server processes that will be sent again. Replies to them are
    kept; all other replies to earlier processes are ignored.
    """

    def __init__(
        self,
        messages: MessageStream,
        describe_loss: Callable[[Loss], Awaitable[SandboxLostError]],
        *,
        unanswered: Collection[int] = (),
    ) -> None:
        self._messages = messages
        self._notification_count = TokenBucket(per_second=NOTIFICATIONS_PER_SECOND, burst=NOTIFICATIONS_BURST)
        self._notification_bytes = TokenBucket(
            per_second=NOTIFICATION_BYTES_PER_SECOND, burst=NOTIFICATION_BYTES_BURST
        )
        self._describe_loss = describe_loss
        first_id = messages.survival.generation << wire.COUNTER_BITS
        self._ids = itertools.count(
            first_id + 1
        )  # never used twice: a late reply must not match a newer request
        self._pending: dict[int, _PendingRequest] = {}
        # A value is None until the reply has come.
        self._unanswered: dict[int, _Reply | None] = dict.fromkeys(unanswered)
        # Requests for whose replies nothing waits.
        self._posted: dict[int, Callable[[], object]] = {}
        self._loss = Loss()
        self.changed_servers = ChangedServers()
        self.tunnels = Tunnels(self.notify, first_id)
        self.ready = False
        """True once the driver has been attached."""
        self.ready_or_closed = Flag()
        """Set once the driver has been attached or never will."""
        self.closed = Flag()
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

        def read(message: Message) -> Any:
            assert not isinstance(message.result, UnsetType)
            try:
                return decode_bounded(message.result, max_nodes=max_nodes)
            except ValueError as error:
                raise DriverError(
                    f"the driver sent an invalid reply to {method}: {error}", reason="invalid_reply"
                ) from None

        return await self.request_message(
            method, params, read, timeout_seconds=timeout_seconds, handlers=handlers
        )

    async def request_message(
        self,
        method: str,
        params: JsonObject,
        read: Callable[[Message], T],
        *,
        on_result: Callable[[T], object] | None = None,
        timeout_seconds: float | None = None,
        handlers: Mapping[str, NotificationHandler | None] | None = None,
        request_id: int | None = None,
        before_send: Callable[[int], object] | None = None,
    ) -> T:
        """Send a request and return what `read` makes of the reply.

        `read` gets a reply with a `result` that has not been checked, and runs in a thread if that is long.
        `on_result` is called with what will be returned. The driver keeps the reply until it has returned, or
        either has raised. `handlers`, by notification method, are called in order with the notifications
        for this request. `request_id` sends the request of an earlier server process again, or takes its
        reply if that has come. `before_send` is called with the id before anything is sent; if it raises,
        nothing is.

        `timeout_seconds` does not count time in which the driver is not attached. Raises DriverError,
        CallTimeoutError, SandboxLostError. On a time-out or cancellation the request is cancelled in the
        driver too.
        """
        number = next(self._ids) if request_id is None else request_id
        if number in self._pending:
            raise ValueError(f"request {number} is pending already")
        if before_send is not None:
            before_send(number)
        pending = self._pending[number] = _PendingRequest(reply=self._unanswered.pop(number, None))
        try:
            if pending.reply is None:
                await self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        except BaseException:
            self._forget(number, pending)
            raise
        return await self.finish(
            number,
            read,
            on_result=on_result,
            timeout_seconds=timeout_seconds,
            timeout_message=f"no answer to {method}",
            handlers=handlers,
        )

    def begin(
        self,
        method: str,
        params: JsonObject,
        *,
        before_send: Callable[[int], object],
        on_change: Callable[[], object],
    ) -> int | None:
        """Send a request without waiting, and return its id; None if that is not possible now.

        `before_send` as for `request_message`. `on_change` is called whenever there may be something for
        `settle` to do, but not by this method. It must end with `settle` or `finish`.
        """
        number = next(self._ids)
        payload = self._messages.encode({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        if payload is None or self.closed.is_set():
            return None
        before_send(number)
        self._pending[number] = _PendingRequest(on_change=on_change)
        self._messages.send_now(payload)
        return number

    def settle(self, number: int, read: Callable[[Message], T], on_result: Callable[[T], object]) -> bool:
        """End a request that `begin` has sent, if its reply has come and can be read without waiting.

        Returns False if it needs `finish`. Otherwise as `request_message`.
        """
        pending = self._pending[number]
        reply = pending.reply
        if reply is None or reply.is_long or pending.notifications:
            return False
        try:
            on_result(reply.read(read))
        finally:
            self._forget(number, pending)
        return True

    async def finish(
        self,
        number: int,
        read: Callable[[Message], T],
        *,
        on_result: Callable[[T], object] | None = None,
        timeout_seconds: float | None = None,
        timeout_message: str = "no answer",
        handlers: Mapping[str, NotificationHandler | None] | None = None,
    ) -> T:
        """Wait for the reply to a request that has been sent. Otherwise as `request_message`."""
        pending = self._pending[number]
        pending.on_change = None
        try:
            reply = await self._wait_until(timeout_seconds, pending, handlers or {})
            if reply is None:
                raise CallTimeoutError(
                    f"{timeout_message} within {timeout_seconds:g} s", seconds=timeout_seconds
                )
            result = await anyio.to_thread.run_sync(reply.read, read) if reply.is_long else reply.read(read)
            if on_result is not None:
                on_result(result)
            return result
        finally:
            if pending.reply is None and not self.closed.is_set():
                del self._pending[number]
                await self._send_cancel(number)
            else:
                self._forget(number, pending)

    def _forget(self, number: int, pending: _PendingRequest) -> None:
        """A request has ended, and the driver may forget its reply."""
        # At the very end, without a pause before the caller continues: what the caller does about a failure
        # without a pause is done before the driver gets the acknowledgement.
        del self._pending[number]
        if pending.reply is not None and pending.reply.number is not None:
            self._messages.acknowledge(pending.reply.number)

    def post(self, method: str, params: JsonObject, on_answer: Callable[[], object]) -> bool:
        """Send a short request without waiting; False if that is not possible now.

        `on_answer` is called when the driver has answered it, with whatever.
        """
        number = next(self._ids)
        message: JsonObject = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        payload = self._messages.encode(message, urgent=True)
        if payload is None:
            return False
        self._posted[number] = on_answer
        self._messages.send_now(payload)
        return True

    def attached_clock(self) -> float:
        """Seconds of a clock that stops while the driver is not attached."""
        return time.monotonic() - self._messages.detached_seconds()

    async def notify(self, method: str, params: JsonObject) -> None:
        """Send a notification. Raises SandboxLostError."""
        await self._send({"jsonrpc": "2.0", "method": method, "params": params})

    async def send_bytes(self, data: bytes) -> None:
        """Write bytes that are no message, such as the driver's source. Raises SandboxLostError."""
        await self._messages.send_bytes(data)

    def attach(self) -> None:
        """Begin to attach to the driver, whose source has been written."""
        self._messages.attach()

    async def read(self) -> None:
        """Dispatch incoming messages until the connection ends."""
        self._close(await self._messages.run(self._on_message, self._on_attached))

    def close(self, reason: str | None = None, *, by_driver: bool = False) -> None:
        """End the connection; pending requests and tunnels fail. Only the first reason counts.

        `by_driver`: see `Loss`.
        """
        self._close(Loss(reason, by_driver))

    def _close(self, loss: Loss) -> None:
        if not self.closed.is_set():
            self._loss = loss
            self.closed.set()
            self.ready_or_closed.set()
            self._messages.close()
            for pending in tuple(self._pending.values()):
                pending.notify()
            self.tunnels.close()

    async def closed_error(self) -> SandboxLostError:
        """The error that says why the connection has ended."""
        return await self._describe_loss(self._loss)

    async def _wait_until(
        self,
        timeout_seconds: float | None,
        pending: _PendingRequest,
        handlers: Mapping[str, NotificationHandler | None],
    ) -> _Reply | None:
        """The reply; None if there is none after so long a time in which the driver was attached."""
        if timeout_seconds is None:
            return await self._wait(pending, handlers)
        while True:
            detached_seconds = self._messages.detached_seconds()
            with anyio.move_on_after(timeout_seconds):
                return await self._wait(pending, handlers)
            timeout_seconds = self._messages.detached_seconds() - detached_seconds
            if timeout_seconds <= 0:
                return None

    async def _wait(
        self, pending: _PendingRequest, handlers: Mapping[str, NotificationHandler | None]
    ) -> _Reply:
        while True:
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
            await pending.changed.wait()

    async def _send(self, message: JsonObject) -> None:
        if self.closed.is_set():
            raise await self.closed_error()
        try:
            await self._messages.send(message)
        except SandboxLostError as error:
            self.close(error.message, by_driver=isinstance(error, StalledError))
            raise await self.closed_error() from None

    async def _send_cancel(self, number: int) -> None:
        with anyio.move_on_after(CANCEL_SECONDS, shield=True):
            try:
                message: JsonObject = {"jsonrpc": "2.0", "method": wire.CANCEL, "params": {"id": number}}
                await self._messages.send(message, urgent=True)
            except SandboxLostError as error:
                self.close(error.message, by_driver=isinstance(error, StalledError))

    def _on_attached(self) -> None:
        self.ready = True
        self.ready_or_closed.set()

    def _on_message(self, number: int, payload: bytes) -> None:
        if not self._dispatch(number, payload):
            self._messages.acknowledge(number)

    def _dispatch(self, number: int, payload: bytes) -> bool:
        """Pass a message on; returns whether it is a reply that somebody acknowledges later."""
        if len(payload) >= READ_IN_THREAD_BYTES and (match := _REPLY_ID.match(payload)) is not None:
            return self._resolve(int(match.group(1)), _Reply(payload, number))
        message = read_message(payload)
        if message is None:
            match = _REPLY_ID.match(payload)
            return match is not None and self._resolve(int(match.group(1)), _Reply(Message(), number))
        if not isinstance(message.id, UnsetType):
            return self._dispatch_reply(message, bytes(message.id), number)
        if not isinstance(message.method, UnsetType):
            self._dispatch_notification(message.method, message.params)
        return False

    def _dispatch_reply(self, message: Message, request_id: bytes, number: int) -> bool:
        # Only an integer is an id that was sent: `true == 1` in Python, and 1.0 too.
        if _INTEGER.fullmatch(request_id):
            return self._resolve(int(request_id), _Reply(message, number))
        if request_id == b"null" and not isinstance(message.error, UnsetType):
            # The driver could not read a request and does not know which one.
            for pending in tuple(self._pending):
                self._resolve(pending, _Reply(message, None))
        return False

    def _resolve(self, request_id: int, reply: _Reply) -> bool:
        """Pass a reply to its request; returns whether that needs it."""
        if (on_answer := self._posted.pop(request_id, None)) is not None:
            on_answer()
            return False
        pending = self._pending.get(request_id)
        if pending is not None and pending.reply is None:
            pending.reply = reply
            pending.notify()
            return True
        if pending is None and self._unanswered.get(request_id, reply) is None:
            self._unanswered[request_id] = reply
            return True
        return False

    def _dispatch_notification(self, method: str, params: Raw | UnsetType) -> None:
        if isinstance(params, UnsetType):
            return
        if method in (wire.PROGRESS, wire.MESSAGE):
            self._queue_notification(method, params)
        elif method == wire.CHANGED:
            if self._notification_count.take():
                self.changed_servers.add(bytes(params))
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
