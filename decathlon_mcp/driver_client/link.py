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
from dataclasses import dataclass
from typing import Any, Self

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup
from decathlon_sandbox import wire
from decathlon_sandbox.lines import MAX_NUMBER, body_of_ids, ids_of_body
from decathlon_sandbox.rates import TokenBucket
from msgspec import Raw, UnsetType

from decathlon_mcp.background import Flag, name_event_loop
from decathlon_mcp.driver_client.messages import (
    MAX_SMALL_NODES,
    Message,
    Notification,
    decode_bounded,
    integer_id,
    raise_error,
    read_message,
    read_notification,
    reply_id,
)
from decathlon_mcp.driver_client.stream import DriverStream, Loss, StreamSource, ViolationError
from decathlon_mcp.driver_client.tunnels import TUNNEL_NOTIFICATIONS, Tunnels
from decathlon_mcp.errors import (
    CallTimeoutError,
    DecathlonError,
    DriverError,
    LimitExceededError,
    SandboxLostError,
    SnapshotError,
)
from decathlon_mcp.types import JsonObject, as_json_with_raw, as_object

OVERHEAD_BYTES = 100
"""Counted for every pending request in addition to its length, so that many short ones are bounded too."""
URGENT_BYTES = 64 << 10
"""Part of REQUEST_BUFFER_BYTES for urgent requests: a `ping`."""
READ_IN_THREAD_BYTES = 1 << 18
"""Replies from this length on are decoded and checked in a thread. In all, that takes up to 50 ms for 4 MiB,
but no single step keeps the event loop waiting for longer than 10 ms."""
NOTIFICATIONS_PER_SECOND = 2 * wire.NOTIFICATIONS_PER_SECOND
NOTIFICATIONS_BURST = 2 * wire.NOTIFICATIONS_BURST
"""Limits on the notifications of one sandbox that are passed on; the driver itself keeps half of it."""
NOTIFICATION_BYTES_PER_SECOND = 1 << 20
NOTIFICATION_BYTES_BURST = 8 << 20
DONE_AFTER_RESPONSES = 32
DONE_AFTER_BYTES = 64 << 10
DONE_AFTER_SECONDS = 0.25
"""When the driver is told which responses it may forget, if no request goes to it before. A request carries
it along, which costs nothing."""
COPIES_OF_COPIES = 256
"""Generations of one server process. A request's id is longer by so many bits."""

_log = logging.getLogger("decathlon.driver")


@dataclass(frozen=True, slots=True)
class Survival:
    """How a link continues after the loss of a stream or of a server process.

    `seconds`: how long the driver waits for a server, and a server for a new stream; with 0, the end of the
    stream is the end. `generation`: higher than that of every server process before, from 1. To a driver, a
    copy of its sandbox that is opened is another server process: see `of_copy`.
    """

    seconds: int = 0
    generation: int = 1

    @classmethod
    def of_server(cls, seconds: int, start: int) -> Self:
        """`start`: number of the server process, from 1. It has room for copies of copies."""
        return cls(seconds, start * COPIES_OF_COPIES)

    def of_copy(self, generation: int) -> Survival:
        """For a copy of a sandbox whose driver was attached to under this generation.

        Raises SnapshotError if there are too many copies of copies.
        """
        generation = max(self.generation, generation + 1)
        if generation >= self.generation + COPIES_OF_COPIES:
            raise SnapshotError(f"there are no more than {COPIES_OF_COPIES} copies of copies of copies")
        return Survival(self.seconds, generation)


NO_SURVIVAL = Survival()


class Request(msgspec.Struct, eq=False):
    """A request to the driver.

    `id`: from `DriverLink.new_id`, or that of a request of an earlier server process. `read`: makes the
    outcome of a reply with a `result`, which has not been checked; it runs in a thread if the reply is long.
    `on_outcome`: called once, with what `read` has returned or the DecathlonError that it or the driver has
    raised; with None if the link has closed. The driver keeps the reply until it has returned. Neither it nor
    `on_notification` may raise. `size_bytes`: length of its message, once it is pending.
    """

    id: int
    method: str
    params: JsonObject
    read: Callable[[Message], Any]
    on_outcome: Callable[[Any], object]
    on_notification: Callable[[Notification], object] | None = None
    size_bytes: int = 0

    def message(self) -> bytes:
        return as_json_with_raw(
            {"jsonrpc": "2.0", "id": self.id, "method": self.method, "params": self.params}
        )


class Handled:
    """Requests whose responses have been handled, until `write` tells the driver so."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write
        self._ids: list[int] = []
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, request_id: int, size_bytes: int) -> None:
        self._ids.append(request_id)
        self._bytes += size_bytes
        if len(self._ids) >= DONE_AFTER_RESPONSES or self._bytes >= DONE_AFTER_BYTES:
            self._write()
        elif self._timer is None:
            # A timer: mostly, a request comes first.
            self._timer = asyncio.get_running_loop().call_later(DONE_AFTER_SECONDS, self._on_time)

    def take(self) -> list[bytes]:
        """The body of the line that names them; none if there are none."""
        bodies = [body_of_ids(b"done", self._ids)] if self._ids else []
        self.clear()
        return bodies

    def clear(self) -> None:
        self._ids.clear()
        self._bytes = 0

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_time(self) -> None:
        self._timer = None
        if self._ids:
            self._write()


class NotificationLimit:
    """Limits on the notifications of one sandbox that are passed on."""

    def __init__(self) -> None:
        self._count = TokenBucket(per_second=NOTIFICATIONS_PER_SECOND, burst=NOTIFICATIONS_BURST)
        self._bytes = TokenBucket(per_second=NOTIFICATION_BYTES_PER_SECOND, burst=NOTIFICATION_BYTES_BURST)

    def take(self, size_bytes: int = 0) -> bool:
        """Whether a notification of that length may be passed on."""
        return (
            size_bytes <= wire.MAX_NOTIFICATION_BYTES and self._count.take() and self._bytes.take(size_bytes)
        )


class DriverLink:
    """Sends requests and notifications to a driver. `run` must run in a task, and `attach` be called once.

    Any number of requests may be pending. `describe_loss` builds the error for a link that has closed.
    `tasks`: for what has to wait; they end with the link. `max_read_bytes`: longest message of the driver.
    `taken_back`: the driver was started by an earlier server process. `unanswered`: ids of that one's
    requests that will be sent again. Replies to them are held until then; all others to it are ignored.
    """

    def __init__(
        self,
        source: StreamSource,
        tasks: TaskGroup,
        describe_loss: Callable[[Loss], Awaitable[SandboxLostError]],
        *,
        max_read_bytes: int = wire.MAX_RESPONSE_BYTES,
        survival: Survival = NO_SURVIVAL,
        taken_back: bool = False,
        unanswered: Collection[int] = (),
    ) -> None:
        self.survival = survival
        self._tasks = tasks
        self._describe_loss = describe_loss
        self.stream = DriverStream(
            source,
            self,
            generation=survival.generation,
            survive_seconds=survival.seconds,
            max_read_bytes=max_read_bytes,
            was_attached=taken_back,
        )
        first_id = survival.generation << wire.COUNTER_BITS
        self._ids = itertools.count(first_id + 1)
        self._pending: dict[int, Request] = {}
        self._pending_bytes = 0
        # The pending requests that the last `attach` named, while the driver has not answered it; then those
        # of which the driver has not said since that it never received them.
        self._named: set[int] = set()
        self._resendable: set[int] = set()
        # Length of the line that says so of all that were named.
        self._max_unknown_bytes = 0
        # Ids of requests that wait for room, and of those whose reply is read in a thread.
        self._waiting_for_room: set[int] = set()
        self._in_thread: set[int] = set()
        # Replies to requests of an earlier server process; None until a reply has come.
        self._unanswered: dict[int, bytes | None] = dict.fromkeys(unanswered)
        self._handled = Handled(self._write_handled)
        self._notifications = NotificationLimit()
        self.on_tools_changed: Callable[[str], object] = lambda server: None
        """Called with the name of a server that announces other tools, which the agent may have chosen."""
        self.tunnels = Tunnels(self.notify, first_id)
        self.ready = False
        """True once the driver has been attached."""
        self.ready_or_closed = Flag()
        """Set once the driver has been attached or never will."""
        self.closed = Flag()
        """Set once the link has closed."""
        self._room = Flag()
        """Wakes requests that wait for room."""
        self._read = anyio.Event()
        """Set when a reply has been read in a thread."""

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
            if not await self._in_time(answered, timeout_seconds):
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
        self._waiting_for_room.add(request.id)
        try:
            message = request.message()
            if len(message) > wire.MAX_LINE_BYTES:
                raise LimitExceededError(
                    f"a message of {len(message)} bytes exceeds the limit of {wire.MAX_LINE_BYTES} bytes"
                )
            while not (self.closed.is_set() or self._fits(message)):
                await self._room.wait()
                if request.id not in self._waiting_for_room:
                    return
            if self.closed.is_set():
                raise await self.closed_error()
            self._send_request(request, message)
        finally:
            self._waiting_for_room.discard(request.id)
            self._forget_unanswered(request.id)

    def send_now(self, request: Request, *, urgent: bool = False) -> bool:
        """`send` without waiting; False if that is not possible now. `urgent`: see `URGENT_BYTES`."""
        message = request.message()
        if self.closed.is_set() or not self._fits(message, urgent=urgent):
            return False
        self._send_request(request, message)
        return True

    def cancel(self, request_id: int) -> None:
        """Forget a request, and cancel it in the driver. No effect on one that has its outcome."""
        if request_id in self._waiting_for_room:
            self._waiting_for_room.discard(request_id)
            self._wake_waiting()
        may_run = self._forget_unanswered(request_id)
        if self._take_pending(request_id) is not None:
            may_run = request_id not in self._in_thread  # else it has its reply
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

    def attached_clock(self) -> float:
        """Seconds of a clock that stops while the driver is not attached."""
        return time.monotonic() - self.stream.clock.detached_seconds

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
        await self.stream.run()
        while self._in_thread and not self.closed.is_set():
            # These replies came before the end.
            await self._read.wait()
            self._read = anyio.Event()
        self._close(Loss())

    def _close(self, loss: Loss) -> None:
        if self.closed.is_set():
            return
        self.stream.lose(loss)
        self._handled.stop()
        self.closed.set()
        self.ready_or_closed.set()
        self._wake_waiting()
        for request in tuple(self._pending.values()):
            self._settle(request, None)
        self.tunnels.close()

    async def _in_time(self, answered: anyio.Event, timeout_seconds: float | None) -> bool:
        """Wait for an event; False if it has not come after so long a time with the driver attached."""
        clock = self.stream.clock
        while timeout_seconds is not None and timeout_seconds > 0:
            detached_seconds = clock.detached_seconds
            with anyio.move_on_after(timeout_seconds):
                await answered.wait()
                return True
            timeout_seconds = clock.detached_seconds - detached_seconds
        if timeout_seconds is None:
            await answered.wait()
        return answered.is_set()

    # pending requests

    def _fits(self, message: bytes, *, urgent: bool = False) -> bool:
        reserved_bytes = OVERHEAD_BYTES + (0 if urgent else URGENT_BYTES)
        return self._pending_bytes + len(message) + reserved_bytes <= wire.REQUEST_BUFFER_BYTES

    def _send_request(self, request: Request, message: bytes) -> None:
        if request.id in self._pending:
            raise ValueError(f"request {request.id} is pending already")
        request.size_bytes = len(message)
        self._pending[request.id] = request
        self._pending_bytes += len(message) + OVERHEAD_BYTES
        if (reply := self._unanswered.pop(request.id, None)) is not None:
            self._resolve(request, reply)
        elif self.stream.is_attached:
            self.stream.write(*self._handled.take(), message)

    def _take_pending(self, request_id: int) -> Request | None:
        request = self._pending.pop(request_id, None)
        if request is not None:
            self._pending_bytes -= request.size_bytes + OVERHEAD_BYTES
            if self._waiting_for_room:
                self._wake_waiting()
        return request

    def _wake_waiting(self) -> None:
        """Wake requests that wait for room."""
        self._room.set()
        self._room = Flag()

    def _write(self, method: str, params: JsonObject) -> None:
        self.stream.write(as_json_with_raw({"jsonrpc": "2.0", "method": method, "params": params}))

    def _write_handled(self) -> None:
        if self.stream.is_attached:
            self.stream.write(*self._handled.take())

    # what the stream reports

    def pending_ids(self) -> list[int]:
        self._handled.clear()  # the driver learns it from this list
        self._named = {*self._pending, *self._unanswered} - self._in_thread
        return [*self._named]

    def on_attached(self) -> None:
        self.ready = True
        self.ready_or_closed.set()
        named, self._named = self._named, set[int]()
        self._resendable = named & self._pending.keys()
        self._max_unknown_bytes = len(b"unknown") + len(named) * len(b" %d" % MAX_NUMBER)
        for request_id in named - self._pending.keys() - self._unanswered.keys():
            self._write(wire.CANCEL, {"id": request_id})
        for request_id in self._pending.keys() - named - self._in_thread:
            self.stream.write(self._pending[request_id].message())

    def on_detached(self) -> None:
        self.tunnels.close()

    def on_line(self, body: bytes) -> None:
        if body.startswith(b"unknown") and len(body) > self._max_unknown_bytes:
            # Reading 4 MiB of ids takes half a second of the event loop.
            raise ViolationError("it has not received more requests than there are")
        if (unknown := ids_of_body(body, b"unknown")) is None:
            self._on_message(body)
            return
        for request_id in unknown:
            # Once for each attachment, whose rate is limited: ten bytes can ask for a request of 64 MiB.
            if request_id not in self._resendable:
                continue
            self._resendable.discard(request_id)
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
                if request.id not in self._in_thread:
                    self._settle(request, _outcome(request, message))

    def _on_reply(self, request_id: int, payload: bytes, message: Message | None = None) -> None:
        """A reply. `message`: the payload as it was decoded, if it was."""
        if request_id in self._in_thread:
            return  # only the first reply counts
        if (request := self._pending.get(request_id)) is not None:
            self._resolve(request, payload, message)
        elif request_id in self._unanswered:
            self._unanswered[request_id] = payload
        else:
            self._handled.add(request_id, len(payload))

    def _resolve(self, request: Request, payload: bytes, message: Message | None = None) -> None:
        if len(payload) >= READ_IN_THREAD_BYTES:
            self._in_thread.add(request.id)
            self._tasks.start_soon(self._resolve_in_thread, request, payload)
            return
        self._settle(request, _outcome(request, message or read_message(payload) or Message()))
        self._handled.add(request.id, len(payload))

    async def _resolve_in_thread(self, request: Request, payload: bytes) -> None:
        def read() -> Any:
            return _outcome(request, read_message(payload) or Message())

        try:
            outcome = await anyio.to_thread.run_sync(read)
        finally:
            self._in_thread.discard(request.id)
            self._read.set()
        self._settle(request, outcome)
        self._handled.add(request.id, len(payload))

    def _settle(self, request: Request, outcome: Any) -> None:
        """Give a request its outcome, unless it was cancelled or has had one."""
        if self._take_pending(request.id) is not None:
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
