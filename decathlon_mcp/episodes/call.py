"""A call, its lines in the trajectory, the requests that wait for its reply, and how a repeat is known.

A call does not belong to the request that began it. It ends early only if all requests that wait for it have
cancelled it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any, Protocol, TypeAlias

import anyio
import anyio.to_thread
import msgspec
from msgspec import Raw

from decathlon_mcp.background import name_event_loop
from decathlon_mcp.driver.driver_messages import Notification
from decathlon_mcp.driver.replies import CallParams, Reply, relayed_notification
from decathlon_mcp.episodes.tools.offered import ToolRoute
from decathlon_mcp.errors import BadRequestError, DecathlonError, DriverError
from decathlon_mcp.storage.trajectory import MAX_KEYS, RequestKeys
from decathlon_mcp.types import JsonObject, as_json, as_object
from decathlon_mcp.validation import quoted

MAX_OPERATION_CHARACTERS = 256
"""Longest id of an operation that a client may choose."""
UNATTENDED_SECONDS = 300.0
"""How long a detached call goes on while nobody waits: as long as `decathlon_client` tries to come back."""
MAX_QUEUED = 1_000
MAX_QUEUED_BYTES = 1 << 20
"""Limits on the notifications that wait for a slow client; the oldest are dropped."""
MAX_LOST = 1_000
"""Calls without a response that was handed over, the newest: each new call of a session is compared with
them."""
MAX_JOINABLE = 16
"""How many calls like a new call are compared, the oldest: a client may have hundreds of the same at once."""
DIGEST_BYTES = 16
HASHED_IN_THREAD_BYTES = 1 << 18
"""Arguments from this length on are hashed in a thread. These take about 0.3 ms; 4 MiB would stop the event
loop for 5 ms."""
NOT_KEPT_MESSAGE = "not kept: the log has reached its limit"
"""Message of the failure that stands for a reply that is too long."""

Outcome: TypeAlias = Reply | DecathlonError
"""The reply of a task's server, or the error that a call failed with."""
NO_KEYS = RequestKeys()

_FAILURES = {
    kind.code: kind for kind in (DecathlonError, *DecathlonError.__subclasses__()) if "code" in vars(kind)
}
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode
_decode_arguments = msgspec.json.Decoder(dict[str, Any]).decode


def call_digest(name: str, arguments: bytes | None) -> str:
    """A digest of a tool's name and its arguments, which does not depend on the order of their keys.

    `arguments` is JSON text. Raises BadRequestError if it is no object.
    """
    try:
        text = _encode_sorted([name, {} if arguments is None else _decode_arguments(arguments)])
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        # It refuses lone surrogates too, and integers of more than 64 bits.
        try:
            value = as_object(json.loads(arguments or b"{}", parse_float=_finite, parse_constant=_finite))
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the arguments are not valid JSON: {error}") from None
        if value is None:
            raise BadRequestError("the arguments must be an object") from None
        text = json.dumps([name, value], sort_keys=True).encode()
    return blake2b(text, digest_size=DIGEST_BYTES).hexdigest()


async def call_digest_of_any_size(name: str, arguments: bytes | None) -> str:
    """`call_digest`, which hashes long arguments in a thread."""
    if arguments is None or len(arguments) < HASHED_IN_THREAD_BYTES:
        return call_digest(name, arguments)
    return await anyio.to_thread.run_sync(call_digest, name, arguments)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"number out of range: {text[:40]}")
    return number


def check_operation(operation: object) -> str:
    """An operation's id that a client chose. Raises BadRequestError."""
    if not isinstance(operation, str) or not operation or len(operation) > MAX_OPERATION_CHARACTERS:
        raise BadRequestError(
            f"`decathlon/operation` must be a string of 1 to {MAX_OPERATION_CHARACTERS} characters"
        )
    return operation


class Waiter:
    """What waits for a call's reply: a request, until its own response is over."""

    call: Call | None = None
    """The call that it began or repeats, once that is known."""
    detached = False
    """Whether the call goes on for UNATTENDED_SECONDS when the waiter is cancelled."""
    _queue: deque[Notification] | None = None
    _bytes = 0
    _failure: DecathlonError | None = None
    _waiting: asyncio.Future[None] | None = None

    def __init__(self, keys: RequestKeys = NO_KEYS, *, detached: bool = False) -> None:
        self._keys, self.detached = keys, detached

    @property
    def keys(self) -> RequestKeys:
        """The keys by which a client that comes back finds the call."""
        return self._keys

    async def is_gone(self) -> bool:
        """Whether the connection to the client broke, so that nobody reads the response."""
        return False

    async def on_notification(self, params: JsonObject, *, is_progress: bool) -> None:
        """Handle a notification of the call, progress or a log message. They come in order."""

    def notify_later(self, notification: Notification) -> None:
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

    async def follow(self) -> None:
        """Wait until something has come, and handle the notifications. Raises the error of `send_away`."""
        if self._failure is not None:
            raise self._failure
        if not self._queue:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        while self._queue:
            notification = self._queue.popleft()
            self._bytes -= len(notification.params)
            if (relayed := relayed_notification(notification)) is not None:
                is_progress, params = relayed
                await self.on_notification(params, is_progress=is_progress)
            await asyncio.sleep(0)  # a queue at its limit takes 60 ms


class Call(msgspec.Struct, eq=False, kw_only=True):
    """An accepted call. The call ends with its outcome, whether or not a request still waits for it."""

    seq: int
    """Number of the call in its episode."""
    digest: str
    """Digest of name and arguments; empty for an ended call that was found without them."""
    keys: RequestKeys = NO_KEYS
    """The keys of the request that began the call."""
    name: str = ""
    params: CallParams = CallParams()
    started_at: float = 0.0
    """When the call was accepted, in Unix seconds."""
    replayed: bool = False
    """Whether another episode made the call."""
    route: ToolRoute | None = None
    request: int | None = None
    """Id of the driver's request, once the call's line is written. Then this server, or an earlier server,
    has sent the call."""
    sent_at: float | None = None
    """When this server sent the call, as a time of `perf_counter`."""
    is_ended: bool = False
    outcome: Outcome | None = None
    """Set when the call ends here. None for a call of an earlier server: the trajectory has its outcome."""
    known: KnownCalls | None = None
    """Where the requests that repeat the call find it."""
    on_cancel: Callable[[Call], object] | None = None
    is_cancelled: bool = False
    """Whether every waiting request was cancelled."""
    waiters: list[Waiter] = msgspec.field(default_factory=list[Waiter])
    """The requests whose responses are not over."""
    _deadline: asyncio.TimerHandle | None = None
    _end: anyio.Event | None = None

    @classmethod
    def of_line(cls, line: JsonObject) -> Call:
        """A call of a server that died, from its last line in the trajectory."""
        request = line.get("request")
        return cls(
            seq=int(line["seq"]),
            name=str(line["name"]),
            params=CallParams.of(as_object(line.get("arguments")), as_object(line.get("meta"))),
            digest=str(line["digest"]),
            started_at=float(line["started_at"]),
            keys=msgspec.convert(line, RequestKeys),
            route=None if request is None else ToolRoute(str(line["server"]), str(line["tool"])),
            request=request,
        )

    def line(self) -> JsonObject:
        """The members of the call's line that do not depend on whether the call was sent."""
        return {
            "seq": self.seq,
            **({"replayed": True} if self.replayed else {}),
            "name": self.name,
            # None if the client sent no arguments, so that a later server can send the same call.
            "arguments": None if self.params.arguments is None else Raw(self.params.arguments),
            **({"meta": self.params.meta} if self.params.meta else {}),
            **msgspec.to_builtins(self.keys),
            "digest": self.digest,
            "started_at": self.started_at,
        }

    def add(self, waiter: Waiter) -> None:
        """A request waits for the call, until its response is over."""
        waiter.call = self
        if not self.is_ended:
            self.waiters.append(waiter)
            self._stop_deadline()

    def remove(self, waiter: Waiter, *, handed_over: bool = False) -> None:
        """The response to a request is over.

        `handed_over`: the transport had its last byte while the connection was there.
        """
        if waiter in self.waiters:
            self.waiters.remove(waiter)
        # Before the call's end the response was another, and the call goes on without it.
        if self.is_ended and self.known is not None:
            self.known.response_over(self, handed_over=handed_over)

    async def wait(self, waiter: Waiter) -> None:
        """Pass the call's notifications on to a request, which was added, until the call has ended.

        If a request is cancelled and no other waits, the call is cancelled, unless the request is detached.
        Raises the error of `Waiter.send_away`.
        """
        try:
            while not self.is_ended:
                await waiter.follow()
        except BaseException:
            self.waiters.remove(waiter)
            if not self.waiters and not self.is_ended:
                if waiter.detached:
                    name_event_loop()
                    loop = asyncio.get_running_loop()
                    self._deadline = loop.call_later(UNATTENDED_SECONDS, self._cancel)
                else:
                    self._cancel()
            raise

    async def ended(self) -> None:
        """Wait until the call has ended, without a claim to its outcome."""
        if not self.is_ended:
            self._end = self._end or anyio.Event()
            await self._end.wait()

    def abandon(self) -> None:
        """Cancel the call as soon as no request waits for it, even if the last one was detached."""
        for waiter in self.waiters:
            waiter.detached = False
        if not self.waiters:
            self._cancel()

    async def is_abandoned(self) -> bool:
        """Whether nobody can get the reply: all connections broke, or the server that had them died."""
        before = tuple(self.waiters)
        are_gone = all([await waiter.is_gone() for waiter in before])
        # Another request may have come back for it meanwhile.
        return are_gone and all(waiter in before for waiter in self.waiters)

    def on_notification(self, notification: Notification) -> None:
        """A notification of the call has arrived."""
        for waiter in self.waiters:
            waiter.notify_later(notification)

    def end(self, outcome: Outcome) -> None:
        """End the call; each waiting request gets the outcome after its queued notifications."""
        self.outcome, self.is_ended = outcome, True
        self._stop_deadline()
        if self._end is not None:
            self._end.set()
        for waiter in self.waiters:
            waiter.wake()

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cancel(self) -> None:
        # A call of a server that died, which may have run already, is not cancelled before it is sent again.
        may_be_cancelled = self.request is None or self.sent_at is not None
        if self.on_cancel is not None and may_be_cancelled and not self.is_ended:
            self.is_cancelled = True
            self.on_cancel(self)


def outcome_member(outcome: Outcome) -> tuple[str, object]:
    """The member of the line `reply` that has this outcome."""
    if isinstance(outcome, DecathlonError):
        data = {"data": outcome.data} if outcome.data else {}
        return "failure", {"code": outcome.code, "message": outcome.message, **data}
    if outcome.result is not None:
        return "result", Raw(outcome.result)
    return "error", outcome.error


def outcome_of_line(line: JsonObject) -> Outcome:
    """The outcome that a line `reply` has."""
    if (failure := as_object(line.get("failure"))) is not None:
        kind = _FAILURES.get(str(failure.get("code")), DriverError)
        return kind(str(failure.get("message")), **(as_object(failure.get("data")) or {}))
    if (result := as_object(line.get("result"))) is not None:
        return Reply.from_result(as_json(result))
    return Reply(None, as_object(line.get("error")) or {})


class CallGate(Protocol):
    """Decides when the calls of an episode may be sent."""

    def holds(self, call: Call) -> bool:
        """Whether the call has to wait now."""
        ...

    async def passed(self, call: Call) -> None:
        """Wait until the call may be sent."""
        ...

    def call_ended(self) -> None:
        """A call has its outcome."""
        ...


class KnownCalls:
    """The calls that the requests of one episode may repeat.

    A request repeats a call only if it (a) names the call's operation, an id that its client has chosen, (b)
    has an event id that this server has made for a response of the call, or (c) has the tool and the
    arguments of a call of its session whose response was not handed over: there is no reply and its
    connections broke, or a reply and they broke before the transport had its last byte, or the server died
    before the reply's line. A JSON-RPC id is no key: clients use one again.
    """

    def __init__(self) -> None:
        # Keys, each with the number and the digest of its call; the oldest is first.
        self._by_key: dict[str, tuple[int, str]] = {}
        self.running: dict[int, Call] = {}
        """The calls without a reply so far, by their numbers."""
        # Calls of sessions whose response was not handed over; ended calls without params and outcome.
        self._lost: dict[int, Call] = {}
        self._ended: anyio.Event | None = None
        """Set by the next end of a call, if something waits for it."""

    async def idle(self) -> None:
        """Wait until no call runs that was sent."""
        while any(call.sent_at is not None for call in self.running.values()):
            self._ended = anyio.Event()
            await self._ended.wait()

    async def find(self, keys: RequestKeys, digest: str) -> Call | None:
        """The call that a request repeats.

        Returns None for a new call; then nothing is awaited between the last check and the return. Raises
        BadRequestError if another call has the same operation id.
        """
        if (known := self.by_keys(keys, digest)) is not None or keys.session is None:
            return known
        like = (call for call in self._lost.values() if call.digest == digest)
        for call in [call for call in like if call.keys.session == keys.session][:MAX_JOINABLE]:
            if await call.is_abandoned() and call.seq in self._lost:
                if call.is_ended:
                    # Another request with the same arguments is a new call, unless this request is lost too.
                    del self._lost[call.seq]
                return self.by_keys(keys, digest) or call
        # A request with the same operation may have come meanwhile.
        return self.by_keys(keys, digest)

    def by_keys(self, keys: RequestKeys, digest: str = "") -> Call | None:
        """The call that has a key of this request. `digest`: what it must have. Raises BadRequestError."""
        for text in keys.texts:
            if (found := self._by_key.get(text)) is None:
                continue
            seq, known_digest = found
            if digest and known_digest != digest:
                raise BadRequestError(
                    f"operation {quoted(keys.operation or '')} was another call, with another tool or other "
                    "arguments; a request that is sent again must be the same, and a new one needs a new id"
                )
            return self.running.get(seq) or Call(seq=seq, digest=digest, keys=keys, known=self, is_ended=True)
        return None

    def add(self, call: Call) -> None:
        """Keep a call that begins. Its keys are new."""
        self.running[call.seq], call.known = call, self
        self._keep_lost(call)
        self.remember(call.seq, call.digest, call.keys.texts)

    def remember(self, seq: int, digest: str, texts: Iterable[str]) -> bool:
        """Keep a request's keys for a call, and drop the oldest over MAX_KEYS; False if all are known."""
        new = [text for text in texts if text not in self._by_key]
        for key in new:
            self._by_key[key] = seq, digest
            if len(self._by_key) > MAX_KEYS:
                del self._by_key[next(iter(self._by_key))]
        return bool(new)

    def end(self, call: Call, outcome: Outcome) -> None:
        """The call has ended, and the trajectory has its reply."""
        self.running.pop(call.seq, None)
        call.end(outcome)
        if self._ended is not None:
            self._ended.set()
        if call.is_cancelled:
            self._lost.pop(call.seq, None)
        else:
            self._drop_outcome(call)

    def response_over(self, call: Call, *, handed_over: bool) -> None:
        """The response to a request that has waited for an ended call is over. See `Call.remove`."""
        if handed_over:
            self._lost.pop(call.seq, None)
        elif call.outcome is None and call.digest:
            self._keep_lost(call)
        else:
            self._drop_outcome(call)

    def _keep_lost(self, call: Call) -> None:
        if call.keys.session is not None:
            self._lost[call.seq] = call
            if len(self._lost) > MAX_LOST:
                del self._lost[next(iter(self._lost))]

    def _drop_outcome(self, call: Call) -> None:
        """Keep of a call whose response was not handed over that it has ended."""
        if not call.waiters and call.seq in self._lost:
            call.outcome, call.params = None, CallParams()
