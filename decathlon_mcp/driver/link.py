"""Requests to a driver, over a stream that may be lost.

A request is pending until its outcome has been handled. Whenever a driver is attached, it learns which
requests are pending; those that it has never received are sent again, and it sends the responses of the
others again. So a request runs once and its response arrives, whatever happens to the stream.

Whatever the driver sends is handled where it is read, without a task: a reply goes to its request's
`on_outcome`, a notification to its `on_notification`. Nothing that it sends is trusted: the depth and the
number of values of a message, and the rates, are bounded, and messages that belong to no pending request are
ignored.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from decathlon_sandbox import wire
from decathlon_sandbox.lines import MAX_NUMBER, ids_of_body
from msgspec import Raw, UnsetType

from decathlon_mcp.background import Flag, name_event_loop
from decathlon_mcp.driver.messages import (
    MAX_SMALL_NODES,
    Message,
    decode_bounded,
    integer_id,
    raise_error,
    read_message,
    read_notification,
    reply_id,
)
from decathlon_mcp.driver.pending import (
    NO_SURVIVAL,
    Handled,
    NotificationLimit,
    PendingRequests,
    Request,
    Survival,
)
from decathlon_mcp.driver.stream import DriverStream, Loss, StreamSource, ViolationError
from decathlon_mcp.driver.tunnels import TUNNEL_NOTIFICATIONS, Tunnels
from decathlon_mcp.errors import (
    CallTimeoutError,
    DecathlonError,
    DriverError,
    LimitExceededError,
    SandboxLostError,
)
from decathlon_mcp.types import JsonObject, as_json_with_raw, as_object

READ_IN_THREAD_BYTES = 1 << 18
"""Replies from this length on are decoded and checked in a thread. In all, that takes up to 50 ms for 4 MiB,
but no single step keeps the event loop waiting for longer than 10 ms."""

UNKNOWN_ID_BYTES = len(b" %d" % MAX_NUMBER)
"""Of an id in the line with which the driver says which requests it never received."""
MIN_BEAT_SECONDS = 0.1
"""Shortest time between two beats: the rest of a lease does not get less while the driver is not attached."""

_log = logging.getLogger("decathlon.driver")


class DriverLink:
    """Sends requests and notifications to a driver. `run` must run in a task, and `attach` be called once.

    Any number of requests may be pending. `describe_loss` builds the error for a link that has closed.
    `max_read_bytes`: longest message of the driver. `reattached`: the driver was started by an earlier server
    process. `unanswered`: ids of that process's requests that will be sent again. Replies to them are held
    until then; all others to that process are ignored.
    """

    def __init__(
        self,
        source: StreamSource,
        describe_loss: Callable[[Loss], Awaitable[SandboxLostError]],
        *,
        max_read_bytes: int = wire.MAX_RESPONSE_BYTES,
        survival: Survival = NO_SURVIVAL,
        reattached: bool = False,
        unanswered: Collection[int] = (),
    ) -> None:
        self.survival = survival
        self._describe_loss = describe_loss
        self.stream = DriverStream(
            source,
            self,
            survival,
            max_read_bytes=max_read_bytes,
            was_attached=reattached,
        )
        self._ids = itertools.count((survival.generation << wire.COUNTER_BITS) + 1)
        self._pending = PendingRequests()
        # The requests that the last `attach` named. A request goes when the driver answers that it never
        # received it.
        self._named: set[int] = set()
        # Replies to requests of an earlier server process; None until a reply has come.
        self._unanswered: dict[int, bytes | None] = dict.fromkeys(unanswered)
        self._handled = Handled(self._write_handled)
        self._notifications = NotificationLimit()
        self._threads: TaskGroup  # while it runs
        self.on_tools_changed: Callable[[str], object] = lambda server: None
        """Called with the name of a server that announces other tools, which the agent may have chosen."""
        self.tunnels = Tunnels(self.notify)
        self.ready_or_closed = Flag()
        """Set once the driver has been attached or never will."""
        self.closed = Flag()
        """Set once the link has closed."""

    # requests

    def new_id(self) -> int:
        """The id of a new request. Never used twice: a late reply must not match a newer request."""
        return next(self._ids)

    async def request(
        self,
        method: str,
        params: JsonObject,
        *,
        timeout_seconds: float | None = None,
        max_nodes: int = MAX_SMALL_NODES,
        read: Callable[[Message], Any] | None = None,
    ) -> Any:
        """Send a request and return its result, of at most `max_nodes` values and keys.

        `read`: as for `Request`, instead of decoding the result. `timeout_seconds` does not count time in
        which the driver is not attached. On a time-out or cancellation the request is cancelled in the driver
        too. Raises DriverError (with reason `invalid_reply` for a result that exceeds a limit or is not
        JSON), CallTimeoutError, SandboxLostError.
        """

        def decode(message: Message) -> Any:
            assert not isinstance(message.result, UnsetType)
            try:
                return decode_bounded(message.result, max_nodes=max_nodes)
            except ValueError as error:
                raise DriverError(
                    f"the driver sent an invalid reply to {method}: {error}", reason="invalid_reply"
                ) from None

        answered, outcomes = anyio.Event(), list[Any]()

        def settle(outcome: Any) -> None:
            outcomes.append(outcome)
            answered.set()

        def read_result(message: Message) -> tuple[Any]:
            return ((read or decode)(message),)  # in a tuple, as the result may be null

        request = Request(self.new_id(), method, params, read_result, settle)
        await self.send(request)
        try:
            if not await self.stream.clock.wait(answered, timeout_seconds):
                raise CallTimeoutError(
                    f"no answer to {method} within {timeout_seconds:g} s", seconds=timeout_seconds
                )
        finally:
            self.cancel(request.id)
        outcome = outcomes[0]
        if outcome is None:
            raise await self.closed_error()
        if isinstance(outcome, DecathlonError):
            raise outcome
        return outcome[0]

    async def send(self, request: Request) -> None:
        """Send a request, all of it or nothing. Waits while too much has no reply.

        Its params may contain `msgspec.Raw` without line feeds. Raises LimitExceededError for one that is too
        long, and SandboxLostError; then `on_outcome` is not called. One that is cancelled meanwhile is not
        sent, and has no outcome. Of one that is not sent, no reply from the time of an earlier server process
        is held any more.
        """
        try:
            message = request.message()
            if len(message) > wire.MAX_LINE_BYTES:
                raise LimitExceededError(
                    f"a message of {len(message)} bytes exceeds the limit of {wire.MAX_LINE_BYTES} bytes"
                )
            while not (self.closed.is_set() or self._pending.fits(message)):
                if not await self._pending.wait(request.id):
                    return
            if self.closed.is_set():
                raise await self.closed_error()
            self._send_request(request, message)
        finally:
            self._forget_unanswered(request.id)

    def send_now(self, request: Request, *, urgent: bool = False) -> bool:
        """`send` without waiting; False if that is not possible now. `urgent`: see `pending.URGENT_BYTES`."""
        message = request.message()
        if self.closed.is_set() or not self._pending.fits(message, urgent=urgent):
            return False
        self._send_request(request, message)
        return True

    def cancel(self, request_id: int) -> None:
        """Forget a request, and cancel it in the driver. No effect on one that has its outcome."""
        self._pending.cancel_waiting(request_id)
        may_run = self._forget_unanswered(request_id)
        if (request := self._pending.take(request_id)) is not None:
            may_run = not request.is_read  # else it has its reply
        if may_run:
            # While no driver is attached, the next attachment tells it.
            self._write(wire.CANCEL, {"id": request_id})

    async def notify(self, method: str, params: JsonObject) -> None:
        """Send a notification, which is lost if no driver is attached. Raises SandboxLostError."""
        if self.closed.is_set():
            raise await self.closed_error()
        self._write(method, params)

    async def send_bytes(self, data: bytes) -> None:
        """Write bytes that are no message, such as the driver's source. Raises SandboxLostError."""
        if not self.closed.is_set():
            await self.stream.send_bytes(data)
        if self.stream.loss is not None:
            self._close(self.stream.loss)
        if self.closed.is_set():
            raise await self.closed_error()

    def close(self, reason: str | None = None, *, by_driver: bool = False) -> None:
        """Close the link; pending requests and tunnels fail. Only the first reason counts.

        `by_driver`: see `Loss`.
        """
        self._close(Loss(reason, by_driver))

    async def closed_error(self) -> SandboxLostError:
        """The error that says why the link has closed."""
        return await self._describe_loss(self.stream.loss or Loss())

    async def run(self) -> None:
        """Receive until the link closes."""
        name_event_loop()  # what arrives is handled in callbacks
        async with anyio.create_task_group() as self._threads:
            # Replies that came before the end are still read.
            await self.stream.run()
        self._close(Loss())

    def _close(self, loss: Loss) -> None:
        if self.closed.is_set():
            return
        self.stream.lose(loss)
        self._handled.stop()
        self.closed.set()
        self.ready_or_closed.set()
        self._pending.wake()
        for request in tuple(self._pending.values()):
            self._settle(request, None)
        self.tunnels.close()

    # pending requests

    def _send_request(self, request: Request, message: bytes) -> None:
        self._pending.add(request, message)
        if (reply := self._unanswered.pop(request.id, None)) is not None:
            self._resolve(request, reply)
        elif self.stream.is_attached:
            self.stream.write(*self._handled.take(), message)

    def _write(self, method: str, params: JsonObject) -> None:
        self.stream.write(as_json_with_raw({"jsonrpc": "2.0", "method": method, "params": params}))

    def _write_handled(self) -> None:
        if self.stream.is_attached:
            self.stream.write(*self._handled.take())

    # what the stream reports

    def pending_ids(self) -> list[int]:
        self._handled.clear()  # the driver learns it from this list
        pending = (request.id for request in self._pending.values() if not request.is_read)
        self._named = {*pending, *self._unanswered}
        return [*self._named]

    def on_attached(self) -> None:
        self.ready_or_closed.set()
        for request_id in self._named - self._pending.keys() - self._unanswered.keys():
            self._write(wire.CANCEL, {"id": request_id})
        for request in self._pending.values():
            if request.id not in self._named and not request.is_read:
                self.stream.write(request.message())

    def on_detached(self) -> None:
        self.tunnels.close()

    def on_line(self, body: bytes) -> None:
        if body.startswith(b"unknown") and len(body) > UNKNOWN_ID_BYTES * (len(self._named) + 1):
            # Reading 4 MiB of ids takes half a second of the event loop.
            raise ViolationError("it has not received more requests than there are")
        if (unknown := ids_of_body(body, b"unknown")) is None:
            self._on_message(body)
            return
        for request_id in unknown:
            # Once for each attachment, whose rate is limited: ten bytes can ask for a request of 64 MiB.
            if request_id not in self._named:
                continue
            self._named.discard(request_id)
            if (request := self._pending.get(request_id)) is not None:
                self.stream.write(request.message(), again=True)

    def _on_message(self, payload: bytes) -> None:
        """Pass a message on."""
        is_long = len(payload) >= READ_IN_THREAD_BYTES
        if is_long and (request_id := reply_id(payload)) is not None:
            self._on_reply(request_id, payload)
            return
        message = read_message(payload)
        request_id = reply_id(payload) if message is None else integer_id(message.id)
        if request_id is not None:
            # Long ones come here too, if their id is not where the driver writes it.
            self._on_reply(request_id, payload, None if is_long else message or Message())
        elif message is None:
            pass
        elif isinstance(message.id, UnsetType):
            if not isinstance(message.method, UnsetType) and not isinstance(message.params, UnsetType):
                self._on_notification(message.method, message.params)
        elif bytes(message.id) == b"null" and not isinstance(message.error, UnsetType):
            # The driver could not read a request and does not know which one.
            for request in tuple(self._pending.values()):
                if not request.is_read:
                    self._settle(request, _outcome(request, message))

    def _on_reply(self, request_id: int, payload: bytes, message: Message | None = None) -> None:
        """A reply. `message`: the payload as it was decoded, if it was."""
        if (request := self._pending.get(request_id)) is not None:
            if not request.is_read:  # only the first reply counts
                self._resolve(request, payload, message)
        elif request_id in self._unanswered:
            self._unanswered[request_id] = payload
        else:
            self._handled.add(request_id, len(payload))

    def _resolve(self, request: Request, payload: bytes, message: Message | None = None) -> None:
        def read() -> Any:
            return _outcome(request, message or read_message(payload) or Message())

        async def resolve_in_thread() -> None:
            self._settle(request, await anyio.to_thread.run_sync(read))
            self._handled.add(request.id, len(payload))

        if len(payload) >= READ_IN_THREAD_BYTES:
            request.is_read = True
            self._threads.start_soon(resolve_in_thread)
        else:
            self._settle(request, read())
            self._handled.add(request.id, len(payload))

    def _settle(self, request: Request, outcome: Any) -> None:
        """Give a request its outcome, unless it was cancelled or has had one."""
        if self._pending.take(request.id) is not None:
            try:
                request.on_outcome(outcome)
            except Exception:  # noqa: BLE001
                # A fault of ours in one request must not end the others.
                _log.exception("the outcome of a request could not be handled")

    def _forget_unanswered(self, request_id: int) -> bool:
        """Hold no reply to a request of an earlier server process any more; whether none has come so far."""
        if request_id not in self._unanswered:
            return False
        if (reply := self._unanswered.pop(request_id)) is not None:
            self._handled.add(request_id, len(reply))
        return reply is None

    def _on_notification(self, method: str, params: Raw) -> None:
        if method in (wire.PROGRESS, wire.MESSAGE):
            if (read := read_notification(method, params)) is None:
                return
            request_id, notification = read
            request = self._pending.get(request_id)
            if (
                request is not None
                and request.on_notification is not None
                and self._notifications.take(len(notification.params))
            ):
                request.on_notification(notification)
        elif method == wire.CHANGED:
            with suppress(ValueError):
                server = (as_object(decode_bounded(bytes(params))) or {}).get("server")
                if isinstance(server, str) and self._notifications.take():
                    self.on_tools_changed(server)
        elif method in TUNNEL_NOTIFICATIONS:
            self.tunnels.handle(method, bytes(params))


def _outcome(request: Request, message: Message) -> Any:
    """What a request makes of its reply: what `read` returns, or an error."""
    try:
        raise_error(message)
        return request.read(message)
    except DecathlonError as error:
        return error
    except Exception as error:  # noqa: BLE001
        _log.exception("a reply could not be read")
        return DecathlonError(f"a fault of the server: {type(error).__name__}")


class Heartbeat:
    """Sends a ping three times in each lease.

    `boot_seconds`: how long the driver may take to be attached; None for one that runs already.
    """

    # A timer of the event loop and no task: of a thousand episodes most are idle, and a task that sleeps
    # takes several times the memory.

    def __init__(self, link: DriverLink, *, boot_seconds: float | None) -> None:
        self._link = link
        self._lease_seconds = wire.LEASE_SECONDS
        self._period_seconds = min(self._lease_seconds, link.survival.seconds or self._lease_seconds) / 3
        self._boot_seconds = boot_seconds
        self._boot_deadline = None if boot_seconds is None else time.monotonic() + boot_seconds
        # When the ping without an answer was sent, by a clock that stops while the driver is not attached.
        self._pinged_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin. `stop` must be called at the end."""
        self._schedule(self._wait_for_boot())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        if not self._link.closed.is_set():
            self._schedule(self._ping() if self._link.stream.was_attached else self._wait_for_boot())

    def _schedule(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._beat)

    def _wait_for_boot(self) -> float:
        """Check the time limit of the boot; returns the seconds until the next beat."""
        if self._boot_deadline is None:
            return self._period_seconds
        remaining_seconds = self._boot_deadline - time.monotonic()
        if remaining_seconds <= 0:
            self._link.close(f"the driver did not come up within {self._boot_seconds:.0f} s")
        return max(0.0, min(remaining_seconds, self._period_seconds))

    def _ping(self) -> float:
        """Send a ping unless one waits for its answer; returns the seconds until the next beat."""
        now = self._link.stream.clock.time()
        if self._pinged_at is None:
            ping = Request(self._link.new_id(), wire.PING, {}, lambda reply: None, self._on_answer)
            if self._link.send_now(ping, urgent=True):
                self._pinged_at = now
            return self._period_seconds
        remaining_seconds = self._pinged_at + self._lease_seconds - now
        if remaining_seconds <= 0:
            self._link.close(f"the driver has not answered for {self._lease_seconds:.0f} s", by_driver=True)
        return min(max(remaining_seconds, MIN_BEAT_SECONDS), self._period_seconds)

    def _on_answer(self, outcome: object) -> None:
        self._pinged_at = None
