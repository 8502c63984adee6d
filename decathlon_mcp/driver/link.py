"""Requests to a driver, over a stream that may be lost.

A request is pending until its outcome has been handled. Whenever a driver is attached, it learns which
requests are pending; requests that it has never received are sent again, and it sends the responses of the
others again. So a request runs once and its response arrives, whatever happens to the stream.

Whatever the driver sends is handled where it is read, without a task, and is not trusted: only the envelope
of a message is decoded when it arrives, the depth and the number of values of what is in it, and the rates,
are bounded, and messages that belong to no pending request are ignored.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any, Protocol, cast

import anyio
import anyio.to_thread
import msgspec
from anyio import CancelScope
from anyio.abc import TaskGroup
from decathlon_sandbox import wire
from decathlon_sandbox.lines import MAX_NUMBER, body_of_ids, ids_of_body
from decathlon_sandbox.wire import TokenBucket
from msgspec import Raw

from decathlon_mcp.background import Flag, background_tasks, name_event_loop
from decathlon_mcp.driver.driver_messages import (
    MAX_SMALL_NODES,
    NULL,
    Notification,
    decode_bounded,
    read_answer,
    read_message,
    read_notification,
)
from decathlon_mcp.driver.stream import (
    NO_RECONNECTION,
    DriverStream,
    Loss,
    ReconnectPolicy,
    ViolationError,
)
from decathlon_mcp.errors import (
    CallTimeoutError,
    DecathlonError,
    DriverError,
    LimitExceededError,
    SandboxLostError,
)
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.types import JsonObject, as_json_with_raw, as_object

CHANNEL_COST_BYTES = 16 << 10
"""What a message to the channel counts as besides its line: it may wake a task and cause a message, which
takes 80 µs instead of 4. Single bytes in many tunnels took all of the event loop's time."""
READ_IN_THREAD_BYTES = 1 << 18
"""Replies from this length on are decoded and checked in a thread. In all, that takes up to 50 ms for 4 MiB,
but no single step keeps the event loop waiting for longer than 10 ms."""
NOTIFICATION_BYTES_PER_SECOND = 1 << 20
NOTIFICATION_BYTES_BURST = 8 << 20
NOTIFICATION_COST_BYTES = 4 << 10
"""Limits on the notifications of one sandbox that are passed on: a short notification counts as much as its
cost. So there are some twice as many as a driver passes on."""
OVERHEAD_BYTES = 100
"""Counted for every pending request in addition to its length, which bounds many short requests too."""
DONE_AFTER_BYTES = 64 << 10
"""Responses that were handled and that the driver keeps nevertheless. The next request names them without
cost, at the latest a ping; a line of its own is written only for more than this."""
UNKNOWN_ID_BYTES = len(b" %d" % MAX_NUMBER)
"""Of an id in the line with which the driver says which requests it never received."""
ABSENT_SECONDS = 40.0
"""After how long without the driver, and then how often, that is reported. Shorter than the time-outs of
common clients, of which the shortest is a minute."""
MIN_BEAT_SECONDS = 0.1
"""Shortest time between two beats: the rest of a lease does not get less while the driver is not attached."""

_log = logging.getLogger("decathlon.driver")


# The driver writes the id of a reply first.
_REPLY_ID = re.compile(rb'\{"jsonrpc":"2\.0","id":(\d{1,18})[,}]')


class _Request(msgspec.Struct, eq=False):
    """A request without an outcome, see `DriverLink.send`. `is_read`: a thread reads its reply."""

    id: int
    message: bytes
    read: Callable[[bytes], Any]
    on_outcome: Callable[[Any], object]
    on_notification: Callable[[Notification], object] | None
    is_read: bool = False

    def outcome(self, payload: bytes) -> Any:
        """What it makes of its reply: what `read` returns, or an error."""
        try:
            return self.read(payload)
        except DecathlonError as error:
            return error
        except ValueError as error:
            return DriverError(f"the driver sent an invalid reply: {error}", reason="invalid_reply")
        except Exception as error:  # noqa: BLE001
            _log.exception("a reply could not be read")
            return DecathlonError(f"a fault of the server: {type(error).__name__}")


class Channel(Protocol):
    """What a plug-in sends over the stream beside requests, such as tunnels. It does not survive a stream."""

    def handle(self, method: str, params: bytes) -> None:
        """Handle a notification, which may be anything, with its params as JSON."""

    def close(self) -> None:
        """The driver is not attached any more; it may be attached again."""


class DriverLink(DriverStream):
    """Sends requests and notifications to a driver, any number at a time.

    `reattached`: the driver was started by an earlier server process. `unanswered`: ids of that process's
    requests that will be sent again. The driver keeps their replies until then, and no others.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        reconnect: ReconnectPolicy = NO_RECONNECTION,
        reattached: bool = False,
        unanswered: Collection[int] = (),
    ) -> None:
        super().__init__(sandbox, reconnect, was_attached=reattached)
        self._ids = itertools.count((reconnect.generation << wire.COUNTER_BITS) + 1)
        self._pending: dict[int, _Request] = {}
        self._pending_bytes = 0
        self._queue: dict[int, _Request] = {}
        """Requests for which there is no room yet."""
        self._named: set[int] = set()
        """Requests that the last `attach` named and that the driver has not called unknown."""
        self._unanswered = set(unanswered)
        """Requests of an earlier server process that are not sent again yet."""
        self._done: list[int] = []
        """Requests whose responses were handled and of which the driver has no note yet."""
        self._done_bytes = 0
        """Length of their responses."""
        self._notifications = TokenBucket(
            per_second=NOTIFICATION_BYTES_PER_SECOND, burst=NOTIFICATION_BYTES_BURST
        )
        self._threads: TaskGroup  # while it receives
        self._tasks: TaskGroup  # likewise, for a channel
        self.on_tools_changed: Callable[[str], object] = lambda server: None
        """Called with the name, which may be anything, of each server that announces other tools."""
        self.channel: Channel | None = None
        """What handles notifications that belong to no request."""
        self.ready_or_closed = Flag()
        """Set once the driver has been attached or never will."""
        self.closed = Flag()
        """Set once the link has closed."""

    # requests

    def new_request_id(self) -> int:
        """The id of a new request. Never used twice: a late reply must not match a newer request."""
        return next(self._ids)

    async def request(
        self,
        method: str,
        params: JsonObject,
        *,
        kind: Any = Any,
        timeout_seconds: float | None = None,
        max_nodes: int = MAX_SMALL_NODES,
    ) -> Any:
        """Send a request and return its result of this kind, with at most `max_nodes` values and keys.

        `timeout_seconds` does not count time in which the driver is not attached. On a time-out or
        cancellation the request is cancelled in the driver too. Raises DriverError (with reason
        `invalid_reply` for a result that exceeds a limit or is of another kind), CallTimeoutError,
        SandboxLostError.
        """
        answered, outcomes = Flag(), list[Any]()

        def settle(outcome: Any) -> None:
            outcomes.append(outcome)
            answered.set()

        def read(payload: bytes) -> tuple[Any]:
            result = cast("Raw", read_answer(payload).result)
            return (decode_bounded(result, kind, max_nodes=max_nodes),)  # it may be null

        request_id = self.new_request_id()
        self.send(request_id, method, params, read, settle)
        try:
            if not await self.clock.wait(answered, timeout_seconds):
                raise CallTimeoutError(
                    f"no answer to {method} within {timeout_seconds:g} s", seconds=timeout_seconds
                )
        finally:
            self.cancel(request_id)
        outcome = outcomes[0]
        if outcome is None:
            raise await self.closed_error()
        if isinstance(outcome, DecathlonError):
            raise outcome
        return outcome[0]

    def send(
        self,
        request_id: int,
        method: str,
        params: JsonObject,
        read: Callable[[bytes], Any],
        on_outcome: Callable[[Any], object],
        on_notification: Callable[[Notification], object] | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        """Send a request; while too much has no reply, it waits for room, unless it is `urgent`.

        `request_id`: from `new_request_id`, or the id of a request of an earlier server process. `params` may
        contain `msgspec.Raw` without line feeds. `read`: makes the outcome of a reply, an error or a result,
        which has not been checked; it runs in a thread if the reply is long. `on_outcome`: called once, with
        what `read` has returned, or the DecathlonError that it has raised, LimitExceededError for a request
        that is too long, or None if the link has closed. The driver keeps the reply until it has returned.
        Neither it nor `on_notification` may raise.
        """
        message = as_json_with_raw({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})
        request = _Request(request_id, message, read, on_outcome, on_notification)
        if self.closed.is_set():
            on_outcome(None)
        elif len(message) > wire.MAX_LINE_BYTES:
            self.cancel(request_id)
            on_outcome(
                LimitExceededError(
                    f"a message of {len(message)} bytes exceeds the limit of {wire.MAX_LINE_BYTES} bytes"
                )
            )
        elif urgent or (not self._queue and self._has_room(request)):
            self._begin(request)
        else:
            self._queue[request_id] = request

    def cancel(self, request_id: int) -> None:
        """Forget a request, and cancel it in the driver. No effect on a request that has its outcome."""
        self._queue.pop(request_id, None)
        request = self._take(request_id)
        if request_id in self._unanswered:
            self._unanswered.remove(request_id)
            self._note_done(request_id, b"")  # it may have a reply
        elif request is None or request.is_read:
            return  # it has its reply
        # While no driver is attached, the next attachment tells it.
        self.notify(wire.CANCEL, {"id": request_id})

    def notify(self, method: str, params: JsonObject) -> None:
        """Send a notification, which is lost if no driver is attached."""
        self._write(as_json_with_raw({"jsonrpc": "2.0", "method": method, "params": params}))

    # the end of the link

    async def send_bytes(self, data: bytes) -> None:
        """Write bytes that are no message, such as the driver's source. Raises SandboxLostError."""
        with CancelScope() as scope:
            self.closed.on_set(scope.cancel)
            try:
                await self._sandbox.stream.send(data)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self.close("the sandbox is gone")
        if self.closed.is_set():
            raise await self.closed_error()

    def close(self, reason: str | None = None, *, by_driver: bool = False) -> None:
        """Close the link; pending requests and the channel fail. Only the first reason counts, see `Loss`."""
        if self.closed.is_set():
            return
        self._lose(Loss(reason, by_driver))
        self.closed.set()
        self.ready_or_closed.set()
        self._pending |= self._queue
        self._queue.clear()
        for request in tuple(self._pending.values()):
            self._settle(request, None)
        self._on_detached()

    async def closed_error(self) -> SandboxLostError:
        """The error that says why the link has closed, with the provider's cause if it knows one."""
        loss = self._loss or Loss()
        cause = await self._sandbox.cause_of_end() or loss.cause
        # The engine is asked as well: a silent engine would explain a silent driver.
        is_at_fault = loss.by_driver and cause is None and await self._sandbox.is_running()
        reason = loss.reason or "the sandbox's first process ended"
        return SandboxLostError(
            f"sandbox lost: {reason}{f' ({cause})' if cause else ''}",
            cause=cause,
            **({"running": True} if is_at_fault else {}),
        )

    async def receive(self) -> None:
        """Receive until the link closes."""
        name_event_loop()  # what arrives is handled in callbacks
        async with anyio.create_task_group() as self._threads, background_tasks() as self._tasks:
            await super().receive()
            # Replies that came before the end are still read.
        self.close()

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a function in a task that ends with the link."""
        self._tasks.start_soon(work)

    # pending requests

    def _has_room(self, request: _Request) -> bool:
        return self._pending_bytes + len(request.message) + OVERHEAD_BYTES <= wire.REQUEST_BUFFER_BYTES

    def _begin(self, request: _Request) -> None:
        assert request.id not in self._pending, f"request {request.id} is pending already"
        self._pending[request.id] = request
        self._pending_bytes += len(request.message) + OVERHEAD_BYTES
        self._unanswered.discard(request.id)
        self._write(*self._take_done(), request.message)

    def _take(self, request_id: int) -> _Request | None:
        """Remove a pending request, and begin waiting requests as far as there is room."""
        request = self._pending.pop(request_id, None)
        if request is not None:
            self._pending_bytes -= len(request.message) + OVERHEAD_BYTES
            while self._queue and self._has_room(following := next(iter(self._queue.values()))):
                self._begin(self._queue.pop(following.id))
        return request

    def _settle(self, request: _Request, outcome: Any) -> None:
        """Give a request its outcome, unless it was cancelled or has had one."""
        if self._take(request.id) is not None:
            try:
                request.on_outcome(outcome)
            except Exception:  # noqa: BLE001
                # A fault of ours in one request must not end the others.
                _log.exception("the outcome of a request could not be handled")

    async def _read_in_thread(self, request: _Request, payload: bytes) -> None:
        self._settle(request, await anyio.to_thread.run_sync(request.outcome, payload))
        self._note_done(request.id, payload)

    def _note_done(self, request_id: int, payload: bytes) -> None:
        """The driver need not keep a response any more."""
        self._done.append(request_id)
        self._done_bytes += len(payload)
        if self._done_bytes >= DONE_AFTER_BYTES:
            self._write(*self._take_done())

    def _take_done(self) -> list[bytes]:
        """The body of the line that names the requests that are done; none if there are none."""
        bodies = [body_of_ids(b"done", self._done)] if self._done else []
        self._done, self._done_bytes = [], 0
        return bodies

    # what the stream reports

    def _pending_ids(self) -> list[int]:
        self._take_done()  # the driver learns it from this list
        pending = (request.id for request in self._pending.values() if not request.is_read)
        self._named = {*pending, *self._unanswered}
        return [*self._named]

    def _on_attached(self) -> None:
        self.ready_or_closed.set()
        for request_id in self._named - self._pending.keys() - self._unanswered:
            self.notify(wire.CANCEL, {"id": request_id})
        for request in self._pending.values():
            if request.id not in self._named and not request.is_read:
                self._write(request.message)

    def _on_detached(self) -> None:
        if self.channel is not None:
            self.channel.close()

    def _on_line(self, body: bytes) -> None:
        if (match := _REPLY_ID.match(body)) is not None:
            self._on_reply(int(match.group(1)), body)
        elif not body.startswith(b"unknown"):
            if len(body) < READ_IN_THREAD_BYTES:
                self._on_message(body)
        elif len(body) > UNKNOWN_ID_BYTES * (len(self._named) + 1):
            # Reading 4 MiB of ids takes half a second of the event loop.
            raise ViolationError("it has not received more requests than there are")
        else:
            # Once for each attachment, whose rate is limited: ten bytes can ask for a request of 64 MiB.
            for request_id in self._named.intersection(ids_of_body(body, b"unknown") or ()):
                self._named.remove(request_id)
                if (request := self._pending.get(request_id)) is not None:
                    self._write(request.message, again=True)

    def _on_reply(self, request_id: int, payload: bytes) -> None:
        request = self._pending.get(request_id)
        if request is None:
            if request_id not in self._unanswered:
                self._note_done(request_id, payload)
        elif request.is_read:
            pass  # only the first reply counts
        elif len(payload) < READ_IN_THREAD_BYTES:
            self._settle(request, request.outcome(payload))
            self._note_done(request_id, payload)
        else:
            request.is_read = True
            self._threads.start_soon(self._read_in_thread, request, payload)

    def _on_message(self, payload: bytes) -> None:
        """A message that is no reply to a request with an id."""
        message = read_message(payload)
        if bytes(message.id) != b"null":
            pass
        elif message.error is not NULL:
            # The driver could not read a request, nor its id.
            for request in tuple(self._pending.values()):
                if not request.is_read:
                    self._settle(request, request.outcome(payload))
        elif message.method == wire.CHANGED:
            with suppress(ValueError):
                server = (as_object(decode_bounded(message.params)) or {}).get("server")
                if isinstance(server, str) and self._notifications.take(NOTIFICATION_COST_BYTES):
                    self.on_tools_changed(server)
        elif message.method in (wire.PROGRESS, wire.MESSAGE):
            request_id, notification = read_notification(message)
            request = self._pending.get(request_id)
            size_bytes = len(notification.params)
            if (
                request is not None
                and request.on_notification is not None
                and size_bytes <= wire.MAX_NOTIFICATION_BYTES
                and self._notifications.take(max(size_bytes, NOTIFICATION_COST_BYTES))
            ):
                request.on_notification(notification)
        elif self.channel is not None:
            self._reading.spend(CHANNEL_COST_BYTES)
            self.channel.handle(message.method, bytes(message.params))


class Heartbeat:
    """Sends a ping three times in each lease, and reports a driver that stays away.

    `boot_seconds`: how long the driver may take to be attached; None for a running driver.
    """

    # A timer of the event loop and no task: of a thousand episodes most are idle, and a task that sleeps
    # takes several times the memory.

    def __init__(self, link: DriverLink, *, boot_seconds: float | None) -> None:
        self._link = link
        self._lease_seconds = wire.LEASE_SECONDS
        self._period_seconds = min(self._lease_seconds, link.reconnect.seconds or self._lease_seconds) / 3
        self._boot_seconds = boot_seconds
        self._started_at = time.monotonic()
        # When the ping without an answer was sent, by a clock that stops while the driver is not attached.
        self._pinged_at: float | None = None
        self._reported_seconds = 0.0
        """After how long the absence of the driver was reported."""
        self._schedule(min(boot_seconds or self._period_seconds, self._period_seconds))

    def stop(self) -> None:
        """No more pings; must be called at the end."""
        self._timer.cancel()

    def _schedule(self, seconds: float) -> None:
        seconds = min(seconds, ABSENT_SECONDS / 2)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._beat)

    def _beat(self) -> None:
        if self._link.closed.is_set():
            return
        self._report_absence()
        if self._link.was_attached:
            seconds = self._ping()
        elif self._boot_seconds is None:
            seconds = self._period_seconds
        else:
            seconds = self._started_at + self._boot_seconds - time.monotonic()
            if seconds <= 0:
                self._link.close(f"the driver did not come up within {self._boot_seconds:.0f} s")
        self._schedule(min(max(seconds, MIN_BEAT_SECONDS), self._period_seconds))

    def _report_absence(self) -> None:
        absent_seconds = self._link.clock.absent_seconds
        if not absent_seconds:
            self._reported_seconds = 0.0
        elif absent_seconds >= self._reported_seconds + ABSENT_SECONDS:
            self._reported_seconds = absent_seconds
            self._link.clock.on_absent(absent_seconds)

    def _ping(self) -> float:
        """Send a ping unless one waits for its answer; returns the seconds that the driver has for it."""
        now = self._link.clock.time()
        if self._pinged_at is None:
            self._pinged_at = now
            self._link.send(
                self._link.new_request_id(), wire.PING, {}, lambda payload: None, self._on_answer, urgent=True
            )
        seconds = self._pinged_at + self._lease_seconds - now
        if seconds <= 0:
            self._link.close(f"the driver has not answered for {self._lease_seconds:.0f} s", by_driver=True)
        return seconds

    def _on_answer(self, outcome: object) -> None:
        self._pinged_at = None
