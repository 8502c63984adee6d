"""Calls that run exactly once: a request that is sent again gets the reply of the first one.

A request has an *operation*, an id that its client gives it; a request that is sent again has the same one.
A call does not belong to the request that began it. The requests that wait for it are its callers: that one,
those with the same operation, and those with the same tool and arguments whose predecessor lost its
connection. A call ends early only if all its callers have cancelled it.

Of calls that have ended only digests and numbers are kept here; their replies are read from the trajectory.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from hashlib import blake2b
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import msgspec

from decathlon_mcp.background import Cancellation, Signal
from decathlon_mcp.driver_client.replies import CallParams, Reply
from decathlon_mcp.driver_client.rpc import NotificationHandler
from decathlon_mcp.episodes.tools import ToolRoute
from decathlon_mcp.errors import (
    BadRequestError,
    CallTimeoutError,
    DecathlonError,
    DriverError,
    EpisodeClaimedError,
    EpisodeEndedError,
    LimitExceededError,
    SandboxLostError,
)
from decathlon_mcp.foreign_names import quoted
from decathlon_mcp.storage.logged_calls import MAX_OPERATIONS, LoggedOperation
from decathlon_mcp.types import JsonObject, as_object

MAX_OPERATION_CHARACTERS = 256
"""Longest id of an operation that a client may choose."""
UNATTENDED_SECONDS = 300.0
"""How long a detached call goes on without a caller: as long as `decathlon_client` tries to come back."""
MAX_QUEUED = 16
"""Notifications that wait for a slow caller. Further ones wait in `RpcClient`, which drops the oldest."""
MAX_JOINABLE = 16
"""How many calls like a new one are looked at, the oldest: a client may have hundreds of the same at once."""
DIGEST_BYTES = 16
HASHED_IN_THREAD_BYTES = 1 << 18
"""Arguments from this length on are hashed in a thread. These take about 0.3 ms; 4 MiB would stop the event
loop for 5 ms."""

Outcome: TypeAlias = Reply | DecathlonError
"""The reply of a task's server, or the error that a call failed with."""
_Notification: TypeAlias = tuple[bool, JsonObject]
"""Whether it is progress (else a log message), and its params."""

_FAILURES = {
    kind.code: kind
    for kind in (
        DecathlonError,
        CallTimeoutError,
        DriverError,
        EpisodeClaimedError,
        EpisodeEndedError,
        LimitExceededError,
        SandboxLostError,
    )
}
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode
_decode_arguments = msgspec.json.Decoder(dict[str, Any]).decode


def call_digest(name: str, arguments: bytes | None) -> str:
    """A digest of a tool's name and its arguments, which does not depend on the order of their keys.

    `arguments` is JSON text. Raises BadRequestError if it is no object.
    """
    return _digest(_sorted_call(name, arguments))


async def call_digest_of_any_size(name: str, arguments: bytes | None) -> str:
    """`call_digest`, which hashes long arguments in a thread."""
    if arguments is None or len(arguments) < HASHED_IN_THREAD_BYTES:
        return call_digest(name, arguments)
    return await anyio.to_thread.run_sync(call_digest, name, arguments)


def _sorted_call(name: str, arguments: bytes | None) -> bytes:
    try:
        call = [name, {} if arguments is None else _decode_arguments(arguments)]
        return _encode_sorted(call)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return _sorted_with_surrogates(name, arguments or b"{}")


def _sorted_with_surrogates(name: str, arguments: bytes) -> bytes:
    """`_sorted_call` for what msgspec refuses: lone surrogates, and integers of more than 64 bits."""
    try:
        value = as_object(json.loads(arguments, parse_float=_finite, parse_constant=_refuse_constant))
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the arguments are not valid JSON: {error}") from None
    if value is None:
        raise BadRequestError("the arguments must be an object")
    return json.dumps([name, value], sort_keys=True).encode()


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"number out of range: {text[:40]}")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def check_operation(operation: object) -> str:
    """An operation's id that a client chose. Raises BadRequestError."""
    if not isinstance(operation, str) or not operation or len(operation) > MAX_OPERATION_CHARACTERS:
        raise BadRequestError(
            f"`decathlon/operation` must be a string of 1 to {MAX_OPERATION_CHARACTERS} characters"
        )
    return operation


def failure_json(error: DecathlonError) -> JsonObject:
    """An error for the trajectory, see `failure_from_json`."""
    return {"code": error.code, "message": error.message, **({"data": error.data} if error.data else {})}


def failure_from_json(failure: JsonObject) -> DecathlonError:
    kind = _FAILURES.get(str(failure.get("code")), DriverError)
    return kind(str(failure.get("message")), **(as_object(failure.get("data")) or {}))


async def never() -> bool:
    """For a caller whose connection cannot break without ending the server."""
    return False


class Caller(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A request that waits for a call.

    `operation`: its id. `detached`: the call goes on for UNATTENDED_SECONDS when the request is cancelled.
    `is_gone`: whether the connection to the client broke, so that nobody reads the answer. The handlers are
    called with the call's notifications.
    """

    operation: str | None = None
    detached: bool = False
    is_gone: Callable[[], Awaitable[bool]] = never
    on_progress: NotificationHandler | None = None
    on_message: NotificationHandler | None = None


class _Inbox:
    """The notifications for one caller."""

    # Every call has one, and most get no notification: a memory stream would cost several times as much.
    __slots__ = ("changed", "is_open", "on_change", "queue", "room")

    def __init__(self, on_change: Callable[[], object] | None = None) -> None:
        self.on_change = on_change
        """Called instead of setting `changed`, while no task waits for it."""
        self.queue: deque[_Notification] = deque()
        self.is_open = True
        self.changed = Signal()
        self.room: anyio.Event | None = None

    async def put(self, notification: _Notification) -> None:
        """Queue a notification; waits while MAX_QUEUED are queued. No effect once closed."""
        while self.is_open and len(self.queue) >= MAX_QUEUED:
            self.room = self.room or anyio.Event()
            await self.room.wait()
        if self.is_open:
            self.queue.append(notification)
            self._notify()

    async def get(self) -> _Notification | None:
        """The next notification; None once the inbox is closed and empty."""
        while not self.queue:
            if not self.is_open:
                return None
            await self.changed.wait()
        notification = self.queue.popleft()
        self._make_room()
        return notification

    def close(self) -> None:
        self.is_open = False
        self._notify()
        self._make_room()

    def _notify(self) -> None:
        if self.on_change is not None:
            self.on_change()
        else:
            self.changed.set()

    def _make_room(self) -> None:
        if self.room is not None:
            self.room.set()
            self.room = None


class RunningCall(msgspec.Struct, eq=False, kw_only=True):
    """A call without a reply so far. It ends with `finish`.

    Most calls need no task: their reply is handled when it arrives. One that has to wait for anything else
    runs in a task, inside `scope`. `continue_in_task` starts that of a call which began without.

    `request`: the id of the driver's request, once it has one. `resumed`: a server
    that died has begun it. `kept`: whether the trajectory has its line; None before it is written. `started`:
    whether this server runs it. `sent_at`: when it was sent, as a time of `perf_counter`. `unwanted`: its
    client will not come back for it.
    """

    seq: int
    route: ToolRoute
    name: str
    params: CallParams
    digest: str
    started_at: float
    operation: str | None = None
    request: int | None = None
    resumed: bool = False
    kept: bool | None = None
    started: bool = False
    sent_at: float | None = None
    unwanted: bool = False
    scope: Cancellation = msgspec.field(default_factory=Cancellation)
    continue_in_task: Callable[[], object] | None = None
    outcome: Outcome | None = None
    is_finished: bool = False
    _finished: anyio.Event | None = None
    _callers: dict[Caller, _Inbox] = msgspec.field(default_factory=dict[Caller, _Inbox])

    async def wait(self, caller: Caller) -> Outcome | None:
        """Pass the call's notifications on to a caller until it has ended; None if the episode ended first.

        If a caller is cancelled and no other remains, the call is cancelled, unless the caller is detached.
        """
        inbox = self._callers.get(caller)
        if inbox is None and not self.is_finished:
            inbox = self._add(caller, _Inbox())
        if inbox is not None:
            inbox.on_change = None
            await self._attend(caller, inbox)
        return self.outcome

    def watch(self, caller: Caller, on_change: Callable[[], object]) -> None:
        """Begin to wait without a task: `on_change` is called when the call has ended, or has a notification.

        In the second case `wait` has to be called.
        """
        self._add(caller, _Inbox(on_change))

    def _add(self, caller: Caller, inbox: _Inbox) -> _Inbox:
        self._callers[caller] = inbox
        self.scope.set_deadline(None)
        return inbox

    async def _attend(self, caller: Caller, inbox: _Inbox) -> None:
        try:
            while (notification := await inbox.get()) is not None:
                is_progress, params = notification
                handler = caller.on_progress if is_progress else caller.on_message
                if handler is not None:
                    await handler(params)
        except BaseException:
            await self._leave(caller, inbox)
            raise

    async def _leave(self, caller: Caller, inbox: _Inbox) -> None:
        self._callers.pop(caller, None)
        inbox.close()
        # Before the task starts, a call of a server that died cannot be cancelled: it may have run already.
        if self._callers or self.is_finished or not self.started:
            return
        if caller.detached and not self.unwanted:
            self.run_in_task()
            self.scope.set_deadline(UNATTENDED_SECONDS)
            return
        self.end()
        self._finished = self._finished or anyio.Event()
        with anyio.CancelScope(shield=True):
            # The request ends after the driver has the cancellation; that takes SEND_SECONDS at most.
            await self._finished.wait()

    def cancel(self) -> None:
        """End the call as soon as no caller waits for it, even if the last one was detached."""
        self.unwanted = True
        if not self._callers and self.started and not self.is_finished:
            self.end()

    def end(self) -> None:
        """Cancel the call."""
        self.run_in_task()
        self.scope.cancel()

    def run_in_task(self) -> None:
        """Continue in a task, if it has none."""
        if self.continue_in_task is not None:
            continue_in_task, self.continue_in_task = self.continue_in_task, None
            continue_in_task()

    async def is_abandoned(self) -> bool:
        """Whether nobody can get the reply: all connections broke, or the server that had them died."""
        if self.scope.requested or self.is_finished:
            return False
        return self.resumed or all([await caller.is_gone() for caller in tuple(self._callers)])

    async def on_progress(self, params: JsonObject) -> None:
        await self._notify(is_progress=True, params=params)

    async def on_message(self, params: JsonObject) -> None:
        await self._notify(is_progress=False, params=params)

    async def _notify(self, *, is_progress: bool, params: JsonObject) -> None:
        for inbox in tuple(self._callers.values()):
            await inbox.put((is_progress, params))

    def finish(self, outcome: Outcome | None = None) -> None:
        """End the call; its callers get the outcome after the notifications that are queued for them."""
        if not self.is_finished:
            self.outcome = outcome
            self.is_finished = True
            for caller, inbox in tuple(self._callers.items()):
                inbox.close()
                if not inbox.queue:
                    self._callers.pop(caller, None)
            if self._finished is not None:
                self._finished.set()


class CallTasks:
    """The tasks of calls."""

    # Starting a task in a group of anyio's costs several times as much as the task.
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a call, inside its scope."""
        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Wait until the tasks have ended."""
        with anyio.CancelScope(shield=True):
            while self._tasks:
                await asyncio.wait(tuple(self._tasks))


class Operations:
    """The calls of one episode, by operation and by digest."""

    def __init__(self) -> None:
        # Digests of operations, with the number and the digest of each one's call; the oldest is first.
        self._known: dict[bytes, tuple[int, bytes]] = {}
        self._running: dict[int, RunningCall] = {}
        self._by_digest: dict[str, list[RunningCall]] = {}

    @property
    def running(self) -> tuple[RunningCall, ...]:
        """The calls without a reply so far."""
        return tuple(self._running.values())

    async def find(self, operation: str | None, digest: str) -> RunningCall | int | None:
        """The call that a request repeats or joins: one that runs, or the number of one that has ended.

        Returns None for a new call; then nothing is awaited between the last check and the return. Raises
        BadRequestError if the operation is that of another call.
        """
        known = self._find_known(operation, digest)
        if known is not None or digest not in self._by_digest:
            return known
        for call in self._by_digest[digest][:MAX_JOINABLE]:
            if await call.is_abandoned() and call.seq in self._running:
                return self._find_known(operation, digest) or call
        # A request with the same operation may have come meanwhile.
        return self._find_known(operation, digest)

    def is_new(self, operation: str | None, digest: str) -> bool:
        """Whether `find` would return None at once."""
        return digest not in self._by_digest and (operation is None or not self.has(operation))

    def has(self, operation: str) -> bool:
        return _key(operation) in self._known

    def cancel(self, operation: str) -> None:
        """Cancel the call of an operation, see `RunningCall.cancel`; no effect if none is running."""
        seq, _ = self._known.get(_key(operation), (None, b""))
        if seq is not None and (call := self._running.get(seq)) is not None:
            call.cancel()

    def add(self, call: RunningCall) -> None:
        """Keep a call that begins. Its operation is new."""
        self._running[call.seq] = call
        self._by_digest.setdefault(call.digest, []).append(call)
        if call.operation is not None:
            self.remember(LoggedOperation(call.operation, call.digest, call.seq))

    def remember(self, operation: LoggedOperation) -> None:
        """Keep an operation, and drop the oldest one over MAX_OPERATIONS."""
        self._known[_key(operation.operation)] = (operation.seq, bytes.fromhex(operation.digest))
        if len(self._known) > MAX_OPERATIONS:
            del self._known[next(iter(self._known))]

    def forget(self, call: RunningCall) -> None:
        """Forget the operation of a call that was not sent: the next request with it runs."""
        if call.operation is not None:
            self._known.pop(_key(call.operation), None)

    def finish(self, call: RunningCall, outcome: Outcome | None) -> None:
        """The call has ended, and the trajectory has its reply."""
        if self._running.pop(call.seq, None) is not None:
            same = self._by_digest[call.digest]
            same.remove(call)
            if not same:
                del self._by_digest[call.digest]
        call.finish(outcome)

    def restore(self, operations: Iterable[LoggedOperation], unanswered: Iterable[RunningCall]) -> None:
        """Continue those of a server that died."""
        for operation in operations:
            self.remember(operation)
        for call in unanswered:
            self.add(call)

    def _find_known(self, operation: str | None, digest: str) -> RunningCall | int | None:
        if operation is None or (known := self._known.get(_key(operation))) is None:
            return None
        seq, known_digest = known
        if known_digest.hex() != digest:
            raise BadRequestError(
                f"operation {quoted(operation)} was another call, with another tool or other arguments; a "
                "request that is sent again must be the same, and a new one needs a new id"
            )
        return self._running.get(seq, seq)


def _key(operation: str) -> bytes:
    return blake2b(operation.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
