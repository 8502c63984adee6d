"""The link to a driver: requests over the stream of its sandbox. A stream that was lost is opened again.

`decathlon_sandbox.resumable` keeps what the driver has not acknowledged and sends it again. Requests that are
pending while there is no stream just wait.

Whatever the driver sends is handled where it is read, without a task: a reply goes to its request's
`on_outcome`, a notification to its `on_notification`. Nothing that it sends is trusted: the length of a
message, its depth and number of values, and the rates are bounded, and messages that belong to no pending
request are ignored.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from anyio import CancelScope
from anyio.abc import ByteStream, TaskGroup
from decathlon_sandbox import wire
from decathlon_sandbox.rates import TokenBucket
from decathlon_sandbox.resumable import (
    ACKNOWLEDGE_AFTER_SECONDS,
    CHUNK_BYTES,
    NONCE_DIGITS,
    OVERHEAD_BYTES,
    ConnectionFullError,
    Limits,
    ServerEnd,
)
from msgspec import Raw, UnsetType

from decathlon_mcp.background import Flag, background_tasks, name_event_loop
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
from decathlon_mcp.driver_client.tunnels import TUNNEL_NOTIFICATIONS, Tunnels
from decathlon_mcp.errors import (
    CallTimeoutError,
    DecathlonError,
    DriverError,
    LimitExceededError,
    ProviderUnavailableError,
    SandboxLostError,
    SnapshotError,
)
from decathlon_mcp.sandboxes.streams import DirectStream
from decathlon_mcp.types import JsonObject, as_json_with_raw, as_object

SEND_SECONDS = 30.0
"""Time limit for writing one message; a driver that does not read or acknowledge for so long is lost."""
CANCEL_SECONDS = 5.0
"""How long a cancellation waits for room before it is given up."""
ATTACH_SECONDS = 0.2
"""Shortest time between two attachments, because a driver can demand them."""
ANSWER_SECONDS = (2.0, 16.0)
"""How long the driver may take to answer an `attach` before the next one: at first, and after some of them. A
driver that boots on a busy machine takes long, and answers only the last one."""
REOPEN_SECONDS = (0.05, 2.0)
"""Time between attempts to open a stream: at first, and at most."""
ABSENT_SECONDS = 40.0
"""After how long without the driver, and then how often, that is reported. Shorter than the time-outs of
common clients, of which the shortest is a minute."""
DRAIN_SECONDS = 1.0
"""How long a stream that cannot be written to is still read."""
URGENT_BYTES = 64 << 10
"""Part of the send buffer for urgent messages: some hundred cancellations."""
READ_BYTES_PER_SECOND = 16 << 20
READ_BYTES_BURST = 64 << 20
LINE_COST_BYTES = 1 << 10
"""A driver that sends more than this is read slower, so that handling it takes a few per cent of the event
loop's time at most. A line counts as its length and LINE_COST_BYTES, because short lines cost most."""
READ_IN_THREAD_BYTES = 1 << 18
"""Replies from this length on are decoded and checked in a thread. In all, that takes up to 50 ms for 4 MiB,
but no single step keeps the event loop waiting for longer than 10 ms."""
NOTIFICATIONS_PER_SECOND = 2 * wire.NOTIFICATIONS_PER_SECOND
NOTIFICATIONS_BURST = 2 * wire.NOTIFICATIONS_BURST
"""Limits on the notifications of one sandbox that are passed on; the driver itself keeps half of it."""
NOTIFICATION_BYTES_PER_SECOND = 1 << 20
NOTIFICATION_BYTES_BURST = 8 << 20
COPIES_OF_COPIES = 256
"""Generations of one server process. A request's id is longer by so many bits."""
MAX_SERVERS = 1_000
MAX_SERVER_CHARACTERS = 1_000
"""Limits on the names of servers whose tools have changed."""

_log = logging.getLogger("decathlon.driver")
_STREAM_ENDS = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


class StreamSource(Protocol):
    """The part of a `Sandbox` that the link needs."""

    @property
    def stream(self) -> ByteStream: ...

    async def reopen(self) -> None:
        """See `Sandbox.reopen`."""
        ...


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


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a link has closed.

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


class Request(msgspec.Struct, frozen=True, eq=False):
    """A request to the driver.

    `id`: from `DriverLink.new_id`, or that of a request of an earlier server process. `read`: makes the
    outcome of a reply with a `result`, which has not been checked; it runs in a thread if the reply is long.
    `on_outcome`: called once, with what `read` has returned or the DecathlonError that it or the driver has
    raised; with None if the link has closed. The driver keeps the reply until it has returned. Neither it nor
    `on_notification` may raise.
    """

    id: int
    method: str
    params: JsonObject
    read: Callable[[Message], Any]
    on_outcome: Callable[[Any], object]
    on_notification: Callable[[Notification], object] | None = None


class ChangedServers:
    """The servers that announced other tools, until their names are taken."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._added = anyio.Event()

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
        await self._added.wait()
        self._added = anyio.Event()
        names, self._names = self._names, set()
        return names


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
        self._source = source
        self._stream = source.stream
        self._tasks = tasks
        self._describe_loss = describe_loss
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
        first_id = survival.generation << wire.COUNTER_BITS
        self._ids = itertools.count(first_id + 1)
        self._pending: dict[int, Request] = {}
        # Ids of requests that wait for room, and of those whose reply is read in a thread.
        self._waiting_for_room: set[int] = set()
        self._in_thread: set[int] = set()
        # Replies to requests of an earlier server process, with the numbers of their messages; None until a
        # reply has come.
        self._unanswered: dict[int, tuple[Message | bytes, int] | None] = dict.fromkeys(unanswered)
        self.changed_servers = ChangedServers()
        self.tunnels = Tunnels(self.notify, first_id)
        self.ready = False
        """True once the driver has been attached."""
        self.ready_or_closed = Flag()
        """Set once the driver has been attached or never will."""
        self.closed = Flag()
        """Set once the link has closed."""
        self._reading = TokenBucket(per_second=READ_BYTES_PER_SECOND, burst=READ_BYTES_BURST)
        self._notification_count = TokenBucket(per_second=NOTIFICATIONS_PER_SECOND, burst=NOTIFICATIONS_BURST)
        self._notification_bytes = TokenBucket(
            per_second=NOTIFICATION_BYTES_PER_SECOND, burst=NOTIFICATION_BYTES_BURST
        )
        self._scope: CancelScope | None = None
        self._write_scope: CancelScope | None = None
        self._receive_scope: CancelScope | None = None
        # Why the link ends: set before it closes, so that `run` can return first.
        self._loss: Loss | None = None
        self._is_writing = self._is_quiet = False
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
        self._on_absent: Callable[[float], object] | None = None
        self._absence: asyncio.TimerHandle | None = None
        # Wakes `_maintain`, and senders that wait for room.
        self._work = anyio.Event()
        self._room = Flag()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._late: asyncio.TimerHandle | None = None
        self._waiting_senders = 0

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
        """Send a request, all of it or nothing. Waits while too much is not acknowledged.

        Its params may contain `msgspec.Raw` without line feeds. Raises LimitExceededError for one that is too
        long, and SandboxLostError; then `on_outcome` is not called. One that is cancelled meanwhile is not
        sent, and has no outcome. Of one that is not sent, no reply from the time of an earlier server process
        is held any more.
        """
        self._waiting_for_room.add(request.id)
        try:
            payload = await self._payload(_request_message(request))
            if request.id in self._waiting_for_room:
                self._send_request(request, payload)
        finally:
            self._waiting_for_room.discard(request.id)
            self._forget_unanswered(request.id)

    def send_now(self, request: Request, *, urgent: bool = False) -> bool:
        """`send` without waiting; False if that is not possible now. `urgent`: see `URGENT_BYTES`."""
        payload = as_json_with_raw(_request_message(request))
        if self.closed.is_set() or not self._fits(payload, urgent=urgent):
            return False
        self._send_request(request, payload)
        return True

    def cancel(self, request_id: int) -> None:
        """Forget a request, and cancel it in the driver. No effect on one that has its outcome."""
        self._waiting_for_room.discard(request_id)
        may_run = self._forget_unanswered(request_id)
        if self._pending.pop(request_id, None) is not None:
            may_run = request_id not in self._in_thread  # else it has its reply
        if not may_run or self.closed.is_set():
            return
        message: JsonObject = {"jsonrpc": "2.0", "method": wire.CANCEL, "params": {"id": request_id}}
        payload = as_json_with_raw(message)
        if self._fits(payload, urgent=True):
            self._send_payload(payload)
        else:
            self._tasks.start_soon(self._cancel_later, message)

    async def notify(self, method: str, params: JsonObject) -> None:
        """Send a notification. Raises SandboxLostError."""
        self._send_payload(await self._payload({"jsonrpc": "2.0", "method": method, "params": params}))

    async def send_bytes(self, data: bytes) -> None:
        """Write bytes that are no message, such as the driver's source. Raises SandboxLostError."""
        if self.closed.is_set():
            raise await self.closed_error()
        try:
            await self._write_bytes(data)
        except StalledError as error:
            self.close(error.message, by_driver=True)
        if self._is_broken:
            self.close("the sandbox is gone")
        if self.closed.is_set():
            raise await self.closed_error()

    @contextmanager
    def quiet(self) -> Generator[None]:
        """Write nothing to the stream in the body, which should be short; what is sent waits."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False
            self._work.set()

    def attached_clock(self) -> float:
        """Seconds of a clock that stops while the driver is not attached."""
        return time.monotonic() - self._all_detached_seconds()

    def on_absent(self, listener: Callable[[float], object]) -> None:
        """Call `listener` each ABSENT_SECONDS without the driver, with the seconds since it was attached."""
        self._on_absent = listener
        self._watch_absence()

    def _watch_absence(self) -> None:
        if self._on_absent is not None and self._absence is None and self._detached_at is not None:
            self._absence = asyncio.get_running_loop().call_later(ABSENT_SECONDS, self._report_absence)

    def _report_absence(self) -> None:
        self._absence = None
        if self._on_absent is not None and self._detached_at is not None and not self.closed.is_set():
            self._on_absent(time.monotonic() - self._detached_at)
            self._watch_absence()

    def _end_absence(self) -> None:
        if self._absence is not None:
            self._absence.cancel()
            self._absence = None

    def attach(self) -> None:
        """Begin to attach to the driver, whose source has been written."""
        self._may_attach = True
        self._work.set()

    def close(self, reason: str | None = None, *, by_driver: bool = False) -> None:
        """Close the link; pending requests and tunnels fail. Only the first reason counts.

        `by_driver`: see `Loss`.
        """
        self._close(Loss(reason, by_driver))

    async def closed_error(self) -> SandboxLostError:
        """The error that says why the link has closed."""
        return await self._describe_loss(self._loss or Loss())

    def _close(self, loss: Loss) -> None:
        if self.closed.is_set():
            return
        self._loss = loss
        self.closed.set()
        self.ready_or_closed.set()
        if self._late is not None:
            self._late.cancel()
        self._end_absence()
        self._stop_writing()
        _cancel(self._scope)
        self._wake_senders()
        for request in tuple(self._pending.values()):
            self._settle(request, None)
        self.tunnels.close()

    async def _in_time(self, answered: anyio.Event, timeout_seconds: float | None) -> bool:
        """Wait for an event; False if it has not come after so long a time with the driver attached."""
        while timeout_seconds is not None and timeout_seconds > 0:
            detached_seconds = self._all_detached_seconds()
            with anyio.move_on_after(timeout_seconds):
                await answered.wait()
                return True
            timeout_seconds = self._all_detached_seconds() - detached_seconds
        if timeout_seconds is None:
            await answered.wait()
        return answered.is_set()

    async def _cancel_later(self, message: JsonObject) -> None:
        with anyio.move_on_after(CANCEL_SECONDS):
            try:
                payload = await self._payload(message, urgent=True)
            except SandboxLostError:
                return
            self._send_payload(payload)

    async def run(self) -> None:
        """Receive until the link closes."""
        self._loop = asyncio.get_running_loop()
        name_event_loop()  # what arrives is handled in callbacks
        with CancelScope() as self._scope:
            if self.closed.is_set():
                return
            async with background_tasks() as tasks:
                tasks.start_soon(self._maintain_until_lost)
                loss: Loss | None = None
                while loss is None and self._loss is None:
                    with CancelScope() as self._receive_scope:
                        loss = await self._receive()
                    if loss is None and self._loss is None:
                        loss = await self._reopen()
                self._loss = self._loss or loss
                self._stop_writing()
        while self._in_thread and not self.closed.is_set():
            # These replies came before the end.
            await self._next_work()
        self._close(self._loss or Loss())

    # receiving

    def _on_message(self, number: int, payload: bytes) -> None:
        """Pass a message on. A reply is acknowledged once its request has had it."""
        if len(payload) >= READ_IN_THREAD_BYTES and (request_id := reply_id(payload)) is not None:
            self._on_reply(request_id, payload, number)
            return
        message = read_message(payload)
        request_id = reply_id(payload) if message is None else integer_id(message.id)
        if request_id is not None:
            # Long ones come here too, if their id is not where the driver writes it.
            is_long = len(payload) >= READ_IN_THREAD_BYTES
            self._on_reply(request_id, payload if is_long else message or Message(), number)
            return
        if message is None:
            pass
        elif isinstance(message.id, UnsetType):
            if not isinstance(message.method, UnsetType) and not isinstance(message.params, UnsetType):
                self._on_notification(message.method, message.params)
        elif bytes(message.id) == b"null" and not isinstance(message.error, UnsetType):
            # The driver could not read a request and does not know which one.
            for request in tuple(self._pending.values()):
                if request.id not in self._in_thread:
                    self._settle(request, _outcome(request, message))
        self._acknowledge(number)

    def _on_reply(self, request_id: int, reply: Message | bytes, number: int) -> None:
        if request_id in self._in_thread:
            self._acknowledge(number)  # only the first reply counts
        elif (request := self._pending.get(request_id)) is not None:
            self._resolve(request, reply, number)
        elif request_id in self._unanswered and self._unanswered[request_id] is None:
            self._unanswered[request_id] = reply, number
        else:
            self._acknowledge(number)

    def _forget_unanswered(self, request_id: int) -> bool:
        """Hold no reply to a request of an earlier server process any more; whether none has come so far."""
        # As acknowledgements are cumulative, a reply that was held for ever would fill the driver's buffer.
        if request_id not in self._unanswered:
            return False
        if (reply := self._unanswered.pop(request_id)) is not None:
            self._acknowledge(reply[1])
        return reply is None

    def _resolve(self, request: Request, reply: Message | bytes, number: int) -> None:
        if isinstance(reply, bytes):
            self._in_thread.add(request.id)
            self._tasks.start_soon(self._resolve_in_thread, request, reply, number)
            return
        self._settle(request, _outcome(request, reply))
        self._acknowledge(number)

    async def _resolve_in_thread(self, request: Request, payload: bytes, number: int) -> None:
        try:
            outcome = await anyio.to_thread.run_sync(_outcome, request, payload)
        finally:
            self._in_thread.discard(request.id)
            self._work.set()
        self._settle(request, outcome)
        self._acknowledge(number)

    def _settle(self, request: Request, outcome: Any) -> None:
        """Give a request its outcome, unless it was cancelled or has had one."""
        if self._pending.pop(request.id, None) is not None:
            try:
                request.on_outcome(outcome)
            except Exception:  # noqa: BLE001
                # A fault of ours in one request must not end the others.
                _log.exception("the outcome of a request could not be handled")

    def _on_notification(self, method: str, params: Raw) -> None:
        if method in (wire.PROGRESS, wire.MESSAGE):
            self._on_notification_of_request(method, params)
        elif method == wire.CHANGED:
            if self._notification_count.take():
                self.changed_servers.add(bytes(params))
        elif method in TUNNEL_NOTIFICATIONS:
            self.tunnels.handle(method, bytes(params))

    def _on_notification_of_request(self, method: str, params: Raw) -> None:
        if (read := read_notification(method, params)) is None:
            return
        request_id, notification = read
        request, size_bytes = self._pending.get(request_id), len(notification.params)
        if (
            request is not None
            and request.on_notification is not None
            and size_bytes <= wire.MAX_NOTIFICATION_BYTES
            and self._notification_count.take()
            and self._notification_bytes.take(size_bytes)
        ):
            request.on_notification(notification)

    def _acknowledge(self, number: int) -> None:
        """Let the driver forget a message."""
        self._end.acknowledge(number)
        if self._end.acknowledgement_due:
            self._work.set()
        elif self._late is None and self._loop is not None and self._end.acknowledgement_pending:
            # A timer, because `_maintain` would be woken after each reply. Mostly, a message comes first.
            self._late = self._loop.call_later(ACKNOWLEDGE_AFTER_SECONDS, self._acknowledge_late)

    def _acknowledge_late(self) -> None:
        """Acknowledge what no message has acknowledged for a while."""
        self._late = None
        if self._end.acknowledgement_pending:
            self._end.acknowledge_now()
            self._work.set()

    # the stream

    async def _receive(self) -> Loss | None:
        """Receive until the stream ends, or the driver violates the protocol, which is returned."""
        end, stream = self._end, self._stream

        def handle(chunk: bytes) -> float:
            """Handle what has arrived; returns for how long nothing is to be read. Raises _ViolationError."""
            was_attached, unacknowledged_bytes = end.attached, end.unacknowledged_bytes
            messages = end.receive(chunk)
            if end.attached and not was_attached:
                self._on_attached()
            for number, payload in messages:
                self._on_message(number, payload)
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
            return None
        except _ViolationError as violation:
            if end.was_replaced:
                return Loss("another server process has taken the driver over")
            return Loss(f"the driver violated the protocol: {violation}", by_driver=True)

    def _on_attached(self) -> None:
        self._was_attached = self.ready = True
        self.ready_or_closed.set()
        self._unanswered_since = -math.inf
        self._answer_seconds, self._reopen_seconds = ANSWER_SECONDS[0], REOPEN_SECONDS[0]
        if self._detached_at is not None:
            self._detached_seconds += time.monotonic() - self._detached_at
            self._detached_at = None
        self._end_absence()
        self._work.set()
        self._wake_senders()

    def _on_detached(self) -> None:
        if self._detached_at is None:
            self._detached_at = time.monotonic()
            self._watch_absence()

    def _all_detached_seconds(self) -> float:
        """For how long, in all, the driver has not been attached."""
        current = 0.0 if self._detached_at is None else time.monotonic() - self._detached_at
        return self._detached_seconds + current

    async def _reopen(self) -> Loss | None:
        """Open the stream again; returns why that is not possible."""
        was_attached = self._end.attached
        self._end.stream_lost()
        self._is_open = self._is_broken = False
        if self._may_attach:
            # Until then the driver's source is written, which is not sent again: it may still arrive.
            self._stop_writing()
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
                with anyio.move_on_after(deadline - time.monotonic()) as scope:
                    await self._source.reopen()
            except ProviderUnavailableError:
                continue
            except SandboxLostError as error:
                cause = error.data.get("cause")
                return Loss(error.message, cause=cause if isinstance(cause, str) else None)
            if not scope.cancelled_caught:
                self._stream = self._source.stream
                self._is_open = True
                self._unanswered_since = -math.inf
                self._work.set()
                return None
        return Loss(f"its stream could not be opened again within {self.survival.seconds} s")

    # sending

    async def _payload(self, message: JsonObject, *, urgent: bool = False) -> bytes:
        """The bytes of a message for which there is room now. Raises as `send`."""
        payload = as_json_with_raw(message)
        if len(payload) > wire.MAX_LINE_BYTES:
            raise LimitExceededError(
                f"a message of {len(payload)} bytes exceeds the limit of {wire.MAX_LINE_BYTES} bytes"
            )
        if not self.closed.is_set() and not self._fits(payload, urgent=urgent):
            try:
                await self._wait_for_room(payload, urgent=urgent)
            except StalledError as error:
                self.close(error.message, by_driver=True)
        if self.closed.is_set():
            raise await self.closed_error()
        return payload

    def _fits(self, payload: bytes, *, urgent: bool) -> bool:
        size_bytes, reserved_bytes = len(payload), OVERHEAD_BYTES + (0 if urgent else URGENT_BYTES)
        used_bytes = self._end.unacknowledged_bytes + size_bytes + reserved_bytes
        return used_bytes <= wire.REQUEST_BUFFER_BYTES and size_bytes <= self._end.room_bytes

    async def _wait_for_room(self, payload: bytes, *, urgent: bool) -> None:
        """Wait until a message fits. Raises StalledError after SEND_SECONDS without an acknowledgement."""
        remaining_seconds = SEND_SECONDS
        while not (self.closed.is_set() or self._fits(payload, urgent=urgent)):
            # Not their size, which others that send increase.
            first_unacknowledged = self._end.first_unacknowledged
            is_attached, began_at = self._end.attached, time.monotonic()
            self._waiting_senders += 1
            try:
                with anyio.move_on_after(remaining_seconds if is_attached else None):
                    await self._room.wait()
            finally:
                self._waiting_senders -= 1
            if self._end.first_unacknowledged > first_unacknowledged:
                remaining_seconds = SEND_SECONDS
            elif is_attached:
                remaining_seconds -= time.monotonic() - began_at
            if remaining_seconds <= 0:
                raise StalledError(f"the driver has not acknowledged its input for {SEND_SECONDS:.0f} s")

    def _wake_senders(self) -> None:
        if self._waiting_senders:
            self._room.set()
            self._room = Flag()

    def _send_request(self, request: Request, payload: bytes) -> None:
        if request.id in self._pending:
            raise ValueError(f"request {request.id} is pending already")
        self._pending[request.id] = request
        if (reply := self._unanswered.pop(request.id, None)) is None:
            self._send_payload(payload)
        else:
            self._resolve(request, *reply)

    def _send_payload(self, payload: bytes) -> None:
        """Send a message that fits. What the stream does not take at once, `_maintain` writes."""
        try:
            self._end.send(payload)
        except ConnectionFullError as error:
            # Not for lack of room: to a new server process, the driver has named the highest number.
            self._lose(StalledError(f"the driver violated the protocol: {error}"))
            return
        stream = self._stream
        if self._is_writing or self._is_quiet or not self._is_open or self._is_broken:
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

    async def _write(self) -> None:
        """Write what there is, unless another task does. Raises SandboxLostError."""
        if self._is_writing:
            return
        self._is_writing = True
        try:
            while (
                self._is_open
                and not self._is_broken
                and not self._is_quiet
                and (data := self._end.data_to_send())
            ):
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
                with anyio.move_on_after(SEND_SECONDS, shield=True) as self._write_scope:
                    await stream.send(data)
                is_stalled = self._write_scope.cancelled_caught
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            # Its end, which says more, is still to be read.
            if stream is self._stream:
                self._is_broken = True
                self._work.set()
        if is_stalled and stream is self._stream and self._is_open and self._loss is None:
            raise StalledError(f"the sandbox has not read its input for {SEND_SECONDS:.0f} s")

    def _stop_writing(self) -> None:
        """End a write to a stream that is not used any more."""
        _cancel(self._write_scope)

    # what has to be done without a request

    async def _maintain_until_lost(self) -> None:
        try:
            await self._maintain()
        except SandboxLostError as error:
            self._lose(error)

    def _lose(self, error: SandboxLostError) -> None:
        if self._loss is None:
            self._loss = Loss(error.message, by_driver=isinstance(error, StalledError))
        self._stop_writing()
        _cancel(self._scope)

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

    async def _next_work(self) -> None:
        await self._work.wait()
        self._work = anyio.Event()

    async def _drop_broken_stream(self) -> None:
        """End a stream that cannot be written to, after what can still be read."""
        with anyio.move_on_after(DRAIN_SECONDS):
            while self._is_broken:
                await self._next_work()
        if self._is_broken:
            _cancel(self._receive_scope)

    async def _attach(self) -> None:
        """Attach once, and wait for the answer. Raises StalledError."""
        stream = self._stream
        # Everything unacknowledged is sent again, which costs as much as reading it.
        resent_seconds = self._reading.spend(self._end.unacknowledged_bytes if self._was_attached else 0)
        await anyio.sleep(max(resent_seconds, self._attached_at + ATTACH_SECONDS - time.monotonic()))
        if self._unwritten is not None:
            # Else the attachment could not be written.
            await self._write_rest(*self._unwritten)
        if stream is not self._stream or not self._is_open or self._is_broken:
            self._work.set()
            return
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


def _request_message(request: Request) -> JsonObject:
    return {"jsonrpc": "2.0", "id": request.id, "method": request.method, "params": request.params}


def _outcome(request: Request, reply: Message | bytes) -> Any:
    """What a request makes of its reply: what `read` returns, or an error."""
    message = reply if isinstance(reply, Message) else (read_message(reply) or Message())
    try:
        raise_error(message)
        return request.read(message)
    except DecathlonError as error:
        return error
    except Exception as error:  # noqa: BLE001
        _log.exception("a reply could not be read")
        return DecathlonError(f"a fault of the server: {type(error).__name__}")


def _cancel(scope: CancelScope | None) -> None:
    if scope is not None:
        scope.cancel()
