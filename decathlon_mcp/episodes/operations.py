"""Calls that run exactly once: a request that repeats an earlier one gets the reply of the first.

A request repeats a call only if it (a) names the call's operation, an id that its client has chosen, (b) has
an event id that this server has made for a response of the call, or (c) has the tool and the arguments of a
call of its session whose response was not handed over: there is no reply and its connections broke, or a
reply and they broke before the transport had its last byte, or the server died before the reply's line. A
JSON-RPC id is no key: clients use one again.

A call does not belong to the request that began it. It ends early only if all requests that wait for it have
cancelled it. Of calls that have ended only digests and numbers are kept here; their replies are read from the
trajectory.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum, auto
from hashlib import blake2b
from typing import Any, TypeAlias

import anyio.to_thread
import msgspec

from decathlon_mcp import errors
from decathlon_mcp.background import name_event_loop
from decathlon_mcp.driver.client import relayed_notification
from decathlon_mcp.driver.messages import Notification
from decathlon_mcp.driver.replies import CallParams, Reply
from decathlon_mcp.episodes.tools.offered import ToolRoute
from decathlon_mcp.errors import (
    BadRequestError,
    DecathlonError,
    DriverError,
    ProviderUnavailableError,
)
from decathlon_mcp.foreign_names import quoted
from decathlon_mcp.storage.logged_calls import MAX_KEYS, LoggedKey, RequestKeys
from decathlon_mcp.types import JsonObject, as_object

MAX_OPERATION_CHARACTERS = 256
"""Longest id of an operation that a client may choose."""
UNATTENDED_SECONDS = 300.0
"""How long a detached call goes on while nobody waits: as long as `decathlon_client` tries to come back."""
MAX_QUEUED = 1_000
MAX_QUEUED_BYTES = 1 << 20
"""Limits on the notifications that wait for a slow client; the oldest are dropped."""
MAX_JOINABLE = 16
"""How many calls like a new one are looked at, the oldest: a client may have hundreds of the same at once."""
DIGEST_BYTES = 16
HASHED_IN_THREAD_BYTES = 1 << 18
"""Arguments from this length on are hashed in a thread. These take about 0.3 ms; 4 MiB would stop the event
loop for 5 ms."""

Outcome: TypeAlias = Reply | DecathlonError
"""The reply of a task's server, or the error that a call failed with."""

_FAILURES = {
    kind.code: kind
    for kind in (
        errors.DecathlonError,
        errors.CallTimeoutError,
        errors.DriverError,
        errors.EpisodeClaimedError,
        errors.EpisodeEndedError,
        errors.LimitExceededError,
        errors.SandboxLostError,
        errors.UnknownToolError,
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
    """For a request whose connection cannot break without ending the server."""
    return False


NotificationHandler: TypeAlias = Callable[[JsonObject], Awaitable[None]]
"""Called with the params of one notification."""


class Waiter:
    """A request that waits for a call's reply, until its own response is over.

    `keys`: by what its client comes back. `detached`: the call goes on for UNATTENDED_SECONDS when the
    request is cancelled. `is_gone`: whether the connection to the client broke, so that nobody reads the
    response. The handlers are called, in order, with the call's notifications.
    """

    __slots__ = (
        "_bytes",
        "_failure",
        "_queue",
        "_waiting",
        "detached",
        "digest",
        "is_gone",
        "keys",
        "on_message",
        "on_progress",
    )

    def __init__(
        self,
        *,
        keys: RequestKeys | None = None,
        detached: bool = False,
        is_gone: Callable[[], Awaitable[bool]] = never,
        on_progress: NotificationHandler | None = None,
        on_message: NotificationHandler | None = None,
    ) -> None:
        self.keys = keys or RequestKeys()
        self.digest = ""
        """Of the call that it waits for, once that is accepted."""
        self.detached = detached
        self.is_gone = is_gone
        self.on_progress = on_progress
        self.on_message = on_message
        self._queue: deque[Notification] | None = None
        self._bytes = 0
        self._failure: DecathlonError | None = None
        self._waiting: asyncio.Future[None] | None = None

    def notify(self, notification: Notification) -> None:
        """Queue a notification. Of too many, the oldest are dropped."""
        if self._queue is None:
            self._queue = deque()
        self._queue.append(notification)
        self._bytes += len(notification.params)
        while len(self._queue) > MAX_QUEUED or self._bytes > MAX_QUEUED_BYTES:
            self._bytes -= len(self._queue.popleft().params)
        self.wake()

    def wake(self) -> None:
        """There is a notification, or the call has ended."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def send_away(self, error: DecathlonError) -> None:
        """Let the request fail with `error`, while the call goes on for UNATTENDED_SECONDS."""
        self.detached, self._failure = True, error
        self.wake()

    async def follow(self, call: RunningCall) -> None:
        """Handle notifications until the call has ended. Raises the error of `send_away`."""
        while True:
            while self._queue:
                notification = self._queue.popleft()
                self._bytes -= len(notification.params)
                await self._handle(notification)
            if call.is_ended:
                return
            if self._failure is not None:
                raise self._failure
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None

    async def _handle(self, notification: Notification) -> None:
        if (relayed := relayed_notification(notification)) is not None:
            is_progress, params = relayed
            handler = self.on_progress if is_progress else self.on_message
            if handler is not None:
                await handler(params)


class CallState(Enum):
    """Where a call is."""

    WAITING = auto()
    """It is accepted. It waits for the end of the set-up, or for the start of its server."""
    RESTORED = auto()
    """A server that died has sent it, this one not yet."""
    SENT = auto()
    """Its reply is awaited."""
    ENDED = auto()
    """It has its outcome, and the trajectory too."""


class RunningCall(msgspec.Struct, eq=False, kw_only=True):
    """A call that was accepted. It ends with its outcome, whatever becomes of the requests that wait for it.

    `keys`: of the request that began it. `route`: known once it is sent. `request`: the id of the driver's
    request, once it has one. `sent_at`: when it was sent, as a time of `perf_counter`. `cancel`: cancels it,
    for `EpisodeCalls`. `replayed`: another episode had made it.
    """

    seq: int
    name: str
    params: CallParams
    digest: str
    started_at: float
    keys: RequestKeys = msgspec.field(default_factory=RequestKeys)
    route: ToolRoute | None = None
    request: int | None = None
    state: CallState = CallState.WAITING
    replayed: bool = False
    sent_at: float | None = None
    outcome: Outcome | None = None
    cancel: Callable[[RunningCall], object] | None = None
    is_cancelled: bool = False
    """Whether all who waited for it have cancelled it."""
    _waiters: list[Waiter] = msgspec.field(default_factory=list[Waiter])
    """The requests whose responses are not over."""
    _is_abandoned_by_client: bool = False
    _deadline: asyncio.TimerHandle | None = None

    @property
    def is_ended(self) -> bool:
        return self.state is CallState.ENDED

    @property
    def has_waiters(self) -> bool:
        """Whether a request waits for it, or has its reply and sends that."""
        return bool(self._waiters)

    def add(self, waiter: Waiter) -> None:
        """A request will wait for the call, until `remove`."""
        if waiter not in self._waiters:
            self._waiters.append(waiter)
            self._set_deadline(None)

    def remove(self, waiter: Waiter) -> None:
        """The response to a request is over."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    async def wait(self, waiter: Waiter) -> Outcome:
        """Pass the call's notifications on to a request until the call has ended.

        If a request is cancelled and no other waits, the call is cancelled, unless the request is detached.
        """
        if not self.is_ended:
            self.add(waiter)
            try:
                await waiter.follow(self)
            except BaseException:
                self._leave(waiter)
                raise
        assert self.outcome is not None
        return self.outcome

    def _leave(self, waiter: Waiter) -> None:
        self.remove(waiter)
        if self._waiters or self.is_ended:
            return
        if waiter.detached and not self._is_abandoned_by_client:
            self._set_deadline(UNATTENDED_SECONDS)
        else:
            self._cancel()

    def abandon(self) -> None:
        """Cancel the call as soon as no request waits for it, even if the last one was detached."""
        self._is_abandoned_by_client = True
        if not self._waiters:
            self._cancel()

    def _cancel(self) -> None:
        # A call of a server that died, which may have run already, is not cancelled before it is sent again.
        if self.cancel is not None and self.state in (CallState.WAITING, CallState.SENT):
            self.is_cancelled = True
            self.cancel(self)

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            name_event_loop()
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._cancel)

    def on_absent(self, seconds: float) -> None:
        """Answer those who wait, who may ask again: the sandbox has not been reached for so long."""
        for waiter in self._waiters:
            waiter.send_away(
                ProviderUnavailableError(
                    f"the server has not reached the sandbox for {seconds:.0f} s: a fault of its machine or "
                    "engine, not of the agent or the task. The call may have run. The same request again, "
                    "with its operation id or, in its session, with the same arguments, gets its reply and "
                    "does not repeat it",
                    mayHaveRun=True,
                    absentSeconds=round(seconds, 1),
                )
            )

    async def is_abandoned(self) -> bool:
        """Whether nobody can get the reply: all connections broke, or the server that had them died."""
        return all([await waiter.is_gone() for waiter in tuple(self._waiters)])

    def on_notification(self, notification: Notification) -> None:
        """A notification of the call has arrived."""
        for waiter in self._waiters:
            waiter.notify(notification)

    def end(self, outcome: Outcome) -> None:
        """End the call; those who wait get the outcome after the notifications that are queued for them."""
        self.outcome = outcome
        self.state = CallState.ENDED
        self._set_deadline(None)
        for waiter in self._waiters:
            waiter.wake()


class Operations:
    """The calls of one episode, by the keys of their requests, and those whose reply nobody has."""

    def __init__(self) -> None:
        # Digests of keys, with the number and the digest of each one's call; the oldest is first.
        self._known: dict[bytes, tuple[int, bytes]] = {}
        self._running: dict[int, RunningCall] = {}
        # By session and digest, the calls whose response was not handed over, by their numbers; None for one
        # that has ended, and whose requests are over.
        self._open: dict[tuple[str, str], dict[int, RunningCall | None]] = {}
        self._open_keys: dict[int, tuple[str, str]] = {}

    @property
    def running(self) -> tuple[RunningCall, ...]:
        """The calls without a reply so far."""
        return tuple(self._running.values())

    async def find(self, keys: RequestKeys, digest: str) -> RunningCall | int | None:
        """The call that a request repeats: one that runs, or the number of one that has ended.

        Returns None for a new call; then nothing is awaited between the last check and the return. Raises
        BadRequestError if an operation of the request is that of another call.
        """
        known = self._find_known(keys, digest)
        if known is not None or keys.session is None:
            return known
        place = (keys.session, digest)
        for seq, call in tuple(self._open.get(place, {}).items())[:MAX_JOINABLE]:
            is_free = call is None or await call.is_abandoned()
            if is_free and seq in self._open.get(place, {}):
                if seq not in self._running:
                    # Another request with the same arguments is a new call, unless this one is lost too.
                    self.close(seq)
                return self._find_known(keys, digest) or self._running.get(seq, seq)
        # A request with the same operation may have come meanwhile.
        return self._find_known(keys, digest)

    def known(self, keys: RequestKeys) -> int | RunningCall | None:
        """The call of a request that has come before: one that runs, or the number of one that has ended."""
        for text in keys.texts:
            if (found := self._known.get(_key(text))) is not None:
                return self._running.get(found[0], found[0])
        return None

    def abandon(self, operation: str) -> None:
        """See `RunningCall.abandon`; no effect if no call of the operation is running."""
        call = self.known(RequestKeys(operation))
        if isinstance(call, RunningCall):
            call.abandon()

    def add(self, call: RunningCall) -> None:
        """Keep a call that begins. Its keys are new."""
        self._running[call.seq] = call
        self._open_again(call.seq, call.keys.session, call.digest, call)
        self.remember_all(call, call.keys)

    def remember_all(self, call: RunningCall, keys: RequestKeys) -> bool:
        """Keep the keys of a request for a call; False if all of them are known."""
        new = [key for text in keys.texts if (key := _key(text)) not in self._known]
        for key in new:
            self._remember(key, call.seq, call.digest)
        return bool(new)

    def _remember(self, key: bytes, seq: int, digest: str) -> None:
        """Keep a key, and drop the oldest one over MAX_KEYS."""
        self._known[key] = (seq, bytes.fromhex(digest))
        if len(self._known) > MAX_KEYS:
            del self._known[next(iter(self._known))]

    def forget(self, call: RunningCall) -> None:
        """Forget a call that could not be accepted."""
        self._running.pop(call.seq, None)
        self.close(call.seq)
        for text in call.keys.texts:
            self._known.pop(_key(text), None)

    def end(self, call: RunningCall, outcome: Outcome) -> None:
        """The call has ended, and the trajectory has its reply."""
        self._running.pop(call.seq, None)
        call.end(outcome)
        if call.is_cancelled:
            self.close(call.seq)
        elif not call.has_waiters:
            self._forget_outcome(call.seq)

    def response_over(self, call: RunningCall | int, waiter: Waiter, *, handed_over: bool) -> None:
        """The response to a request that has waited for a call is over.

        `handed_over`: the transport had its last byte while the connection was there.
        """
        seq = call if isinstance(call, int) else call.seq
        if isinstance(call, RunningCall):
            call.remove(waiter)
            if not call.is_ended:
                return  # the response was another: the call goes on without it
        if handed_over:
            self.close(seq)
        elif isinstance(call, int):
            self._open_again(seq, waiter.keys.session, waiter.digest, None)
        elif not call.has_waiters:
            self._forget_outcome(seq)

    def close(self, seq: int) -> None:
        """No request repeats this call any more without one of its keys."""
        if (place := self._open_keys.pop(seq, None)) is not None:
            calls = self._open[place]
            del calls[seq]
            if not calls:
                del self._open[place]

    def _open_again(self, seq: int, session: str | None, digest: str, call: RunningCall | None) -> None:
        if session is None or not digest:
            return
        self.close(seq)
        self._open_keys[seq] = place = (session, digest)
        self._open.setdefault(place, {})[seq] = call
        if len(self._open_keys) > MAX_KEYS:
            self.close(next(iter(self._open_keys)))

    def _forget_outcome(self, seq: int) -> None:
        """Keep of an ended call whose response was not handed over that there is one."""
        if (place := self._open_keys.get(seq)) is not None:
            self._open[place][seq] = None

    def restore(self, keys: Iterable[LoggedKey], unanswered: Iterable[RunningCall]) -> None:
        """Continue those of a server that died."""
        for each in keys:
            self._remember(_key(each.key), each.seq, each.digest)
        for call in unanswered:
            self.add(call)

    def _find_known(self, keys: RequestKeys, digest: str) -> RunningCall | int | None:
        for text in keys.texts:
            if (known := self._known.get(_key(text))) is None:
                continue
            seq, known_digest = known
            if known_digest.hex() != digest:
                raise BadRequestError(
                    f"operation {quoted(keys.operation or '')} was another call, with another tool or other "
                    "arguments; a request that is sent again must be the same, and a new one needs a new id"
                )
            return self._running.get(seq, seq)
        return None


def _key(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
