"""Replies that clients can fetch again: the events of a handshake-era request, until its answer is out.

A request that may take long, or has effects, is answered as a stream of events. The first event has an id and
no data, and is sent before the request is dispatched. A client whose stream breaks sends a GET with the id of
the last event that it got, and receives the rest, even from a server that was started meanwhile: the request
itself is in the store until its answer is out, and is dispatched again.

Exactly-once is not decided here: the episode knows a call that it has had before by the ids of its session
and its request.

An event's id is GENERATION.NUMBER.REQUEST: the generation of the server that sent it, its number in the
stream, and the request's JSON-RPC id as JSON, percent-encoded. The number of an answer is `last`.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote, unquote

import anyio
import msgspec
from mcp.server.streamable_http import EventCallback, EventStore
from mcp_types import INVALID_REQUEST, ErrorData, JSONRPCError, JSONRPCMessage, JSONRPCResponse
from starlette.types import Receive, Send

from decathlon_mcp.storage.request_log import RequestRow
from decathlon_mcp.storage.store import Store

LAST_EVENT_KEY = "decathlon.last_event_id"
"""Key of the header `Last-Event-ID` in the ASGI scope."""
RESUMABLE_SINCE = "2025-11-25"
"""The first protocol revision whose clients accept an event without data."""
MAX_STREAMS = 256
"""Requests of one session in progress that can be resumed; further ones are served as without a store."""
MAX_REQUEST_ID_BYTES = 128
"""Longest JSON-RPC id of a request that can be resumed: the id comes back in a header."""
MAX_NOTIFICATIONS = 64
"""Notifications of one request that are kept. A client that resumes misses older ones."""
MAX_NOTIFICATION_BYTES = 256 << 10
"""Size of the notifications of one request that are kept."""
MAX_KEPT_BYTES = 64 << 20
"""Size of the answers of all sessions that are kept in memory. One that was dropped is made again from the
stored request."""
MAX_STORED_BYTES = 64 << 20
"""Size of the requests in the store of one owner: a token, or the clients at an agent's address. Beyond it,
answers of this owner are forgotten early, and further requests are served as without a store. Otherwise a
client that sends long requests and fetches no answer would fill the disk."""
ROW_BYTES = 512
"""Counted for each stored request in addition to its body."""
ANSWERED_SECONDS = 5.0
"""How long a request is kept after its answer was written. The answer may still be in a buffer of this
process, or of a connection that broke without a sign; clients come back after one second."""
UNFETCHED_SECONDS = 300.0
"""How long an answer is kept that no client has fetched. Unmodified clients give up much earlier."""
PING_SECONDS = 15.0
"""Time between two comments on a silent stream: clients and proxies close silent connections."""
FAST_SECONDS = 0.25
"""A request that takes longer notices that its client is gone; before, watching costs more than it saves."""

EVENT_STREAM_HEADERS = (
    (b"cache-control", b"no-cache, no-transform"),
    (b"connection", b"keep-alive"),
    (b"content-type", b"text/event-stream"),
    (b"x-accel-buffering", b"no"),
)
_EVENT_ID = re.compile(r"(?P<generation>[0-9]{1,18})\.(?P<number>[0-9]{1,9}|last)\.(?P<request>[!-~]{1,512})")
PING = b": ping\r\n\r\n"


class EventId(msgspec.Struct, frozen=True):
    """The id of an event. `number`: None for an answer. `request`: a JSON-RPC id as JSON."""

    generation: int
    number: int | None
    request: str

    def __str__(self) -> str:
        return _event_id(self.generation, self.number, self.request)

    @classmethod
    def parse(cls, text: str) -> EventId | None:
        """None if it is not an id of ours."""
        match = _EVENT_ID.fullmatch(text)
        if match is None:
            return None
        request = unquote(match["request"])
        try:
            value = json.loads(request)
        except ValueError:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            return None
        number = None if match["number"] == "last" else int(match["number"])
        return cls(int(match["generation"]), number, request)


def _event_id(generation: int, number: int | None, request: str) -> str:
    text = request if request.isdigit() else quote(request, safe="")
    return f"{generation}.last.{text}" if number is None else f"{generation}.{number}.{text}"


def _stream_id(request: str) -> str:
    """The SDK's name of the stream of a request, whose JSON-RPC id is given as JSON."""
    return request if request.isdigit() else str(json.loads(request))


Owner: TypeAlias = "tuple[str, str] | None"
"""Whose requests are counted together; None: those of everybody who has no other owner."""


def request_id_text(request_id: int | str | None) -> str:
    """A JSON-RPC id as JSON."""
    # The encoder takes ten times as long, and most ids are numbers.
    return str(request_id) if type(request_id) is int else json.dumps(request_id)


class RequestStream:
    """The events of one request, for any number of readers.

    `request`: its JSON-RPC id as JSON. `complete`: the answer is there, or none will come. `answered`: the
    answer was written to a client. `stored_bytes`: size of the request in the store, counted for `owner`.
    """

    def __init__(
        self, session: str, request: str, generation: int, on_answered: Callable[[RequestStream], None]
    ):
        self.owner: Owner = None
        self.stored_bytes = 0
        self.session = session
        self.request = request
        self.complete = False
        self.answered = False
        self.size_bytes = 0
        self.readers = 0
        self._generation = generation
        self._on_answered = on_answered
        self._events: deque[tuple[int, bytes]] = deque()
        self.answer: bytes | None = None
        """The event of the answer, once it is there and as long as it is kept."""
        self._next = 1
        # Most streams are complete before anybody waits.
        self._changed: anyio.Event | None = None

    def add_notification(self, message: JSONRPCMessage) -> str:
        """Keep an event other than the answer, and return its id."""
        event_id = _event_id(self._generation, self._next, self.request)
        frame = event_frame(_encode(message), event_id)
        self._events.append((self._next, frame))
        self.size_bytes += len(frame)
        self._next += 1
        while len(self._events) > MAX_NOTIFICATIONS or self.size_bytes > MAX_NOTIFICATION_BYTES:
            _, oldest = self._events.popleft()
            self.size_bytes -= len(oldest)
        self._notify()
        return event_id

    def add_answer(self, message: bytes) -> str:
        """Keep the answer, a JSON-RPC message on one line, and return the id of its event."""
        event_id = _event_id(self._generation, None, self.request)
        self.answer = event_frame(message, event_id)
        self.size_bytes += len(self.answer)
        self.complete = True
        self._notify()
        return event_id

    def clear(self) -> None:
        """Drop all events. Readers that have not sent the answer yet end their streams."""
        self._events.clear()
        self.answer = None

    def end(self) -> None:
        """No answer will come: readers end their streams."""
        self.complete = True
        self._notify()

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on this stream holds."""
        while not condition():
            self._changed = self._changed or anyio.Event()
            await self._changed.wait()

    async def is_abandoned(self, grace_seconds: float) -> bool:
        """Whether no client came for the answer: none was connected for `grace_seconds` on end.

        Returns when that is so, or the answer was written to a client.
        """
        while not self.answered:
            await self.wait(lambda: self.answered or not self.readers)
            with anyio.move_on_after(grace_seconds) as scope:
                await self.wait(lambda: self.answered or self.readers > 0)
            if scope.cancelled_caught:
                return True
        return False

    async def send(
        self, receive: Receive, send: Send, *, after: EventId | None = None, at_once: bool = False
    ) -> None:
        """Send the events that follow `after`, until the answer or the end of the client's connection.

        The head of the response and the priming event must have been sent. `at_once`: the request has taken
        long already.
        """
        number = after.number if after is not None and after.generation == self._generation else 0
        with self._reading():
            progress = _Progress(number or 0)
            if not at_once:
                with anyio.move_on_after(FAST_SECONDS):
                    await self.wait(lambda: self.complete)
            if not self.complete:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_cancel_when_gone, receive, tasks.cancel_scope)
                    await self._follow(send, progress)
                    tasks.cancel_scope.cancel()
                if not self.complete:
                    return
            await self._send_new(send, progress)
            await self.send_answer(send)

    async def send_answer(self, send: Send) -> None:
        """Send the answer of a complete stream, if there is one, and end the response."""
        answer = self.answer
        # With the end of the response, which would cost another write.
        await send_body(send, answer or b"", more=False)
        if answer is not None:
            self.mark_answered()

    def mark_answered(self) -> None:
        """The answer was written to a client."""
        self.answered = True
        self._on_answered(self)
        self._notify()

    async def _follow(self, send: Send, progress: _Progress) -> None:
        """Send notifications as they come, until the stream is complete."""
        while not self.complete:
            await self._send_new(send, progress)
            with anyio.move_on_after(PING_SECONDS) as silence:
                await self.wait(lambda: self.complete or self._next > progress.sent + 1)
            if silence.cancelled_caught:
                await send_body(send, PING, more=True)

    async def _send_new(self, send: Send, progress: _Progress) -> None:
        for number, frame in list(self._events):
            if number > progress.sent:
                progress.sent = number
                await send_body(send, frame, more=True)
        progress.sent = max(progress.sent, self._next - 1)

    @contextmanager
    def _reading(self) -> Generator[None]:
        self.readers += 1
        self._notify()
        try:
            yield
        finally:
            self.readers -= 1
            self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


@dataclass(slots=True)
class _Progress:
    """How far one reader has got. `sent`: number of the last event."""

    sent: int


class Resumption:
    """The streams of all sessions of one manager. Requests are in the store as long as their streams."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sessions: dict[str, SessionStreams] = {}
        # Complete streams and when to forget them, in the order of these times.
        self._unfetched: OrderedDict[RequestStream, float] = OrderedDict()
        self._answered: OrderedDict[RequestStream, float] = OrderedDict()
        # Those of them that are not marked in the store yet.
        self._unmarked: list[RequestStream] = []
        # Those of them that are in memory, oldest first.
        self._kept: OrderedDict[RequestStream, None] = OrderedDict()
        self._kept_bytes = 0
        self._stored_bytes: Counter[Owner] = Counter()

    @property
    def generation(self) -> int:
        return self._store.generation

    def add_session(self, session: str, owner: Owner = None) -> SessionStreams:
        """The streams of a new or revived session."""
        self._sessions[session] = streams = SessionStreams(session, self, owner)
        return streams

    def end_session(self, session: str) -> None:
        """End all streams of a session. Its rows in the store are the caller's."""
        if (streams := self._sessions.pop(session, None)) is not None:
            for stream in streams:
                stream.end()
                self._drop(stream)
                self._release(stream)
                self._unfetched.pop(stream, None)
                self._answered.pop(stream, None)

    def has_room(self, owner: Owner, body: bytes) -> bool:
        """Whether a request can be stored; makes room for it by forgetting complete ones of its owner."""
        allowed_bytes = MAX_STORED_BYTES - ROW_BYTES - len(body)
        if self._stored_bytes[owner] > allowed_bytes:
            self.forget([each for each in (*self._answered, *self._unfetched) if each.owner == owner])
        return self._stored_bytes[owner] <= allowed_bytes

    def count(self, stream: RequestStream, owner: Owner, body: bytes) -> None:
        """Count a request that is in the store, until it is forgotten."""
        stream.owner, stream.stored_bytes = owner, ROW_BYTES + len(body)
        self._stored_bytes[owner] += stream.stored_bytes

    def insert(self, stream: RequestStream, body: bytes) -> None:
        """Keep a request in the store."""
        self._store.insert_request(RequestRow(stream.session, stream.request, body))

    def _release(self, stream: RequestStream) -> None:
        self._stored_bytes[stream.owner] -= stream.stored_bytes
        stream.stored_bytes = 0
        if not self._stored_bytes[stream.owner]:
            del self._stored_bytes[stream.owner]

    def completed(self, stream: RequestStream) -> None:
        """The answer is there: keep it in memory for a while, at the cost of older ones."""
        if stream.session not in self._sessions:
            return  # nobody can fetch it any more
        self._unfetched[stream] = time.monotonic() + UNFETCHED_SECONDS
        self._kept[stream] = None
        self._kept_bytes += stream.size_bytes
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def answered(self, stream: RequestStream) -> None:
        """The answer was written to a client."""
        if self._unfetched.pop(stream, None) is not None:
            self._answered[stream] = time.monotonic() + ANSWERED_SECONDS
            self._unmarked.append(stream)

    def expire(self) -> None:
        """Mark the requests that were answered, and forget those whose time is over."""
        # Not one by one: if the server dies before, the next one dispatches the request again, and the
        # episode repeats its reply.
        unmarked, self._unmarked = self._unmarked, []
        self._store.answer_requests(
            [(stream.session, stream.request) for stream in unmarked if self._is_newest(stream)]
        )
        now = time.monotonic()
        for streams in (self._answered, self._unfetched):
            over: list[RequestStream] = []
            for stream, until in streams.items():
                if until > now:
                    break
                over.append(stream)
            if over:
                self.forget(over)

    def forget(self, over: Iterable[RequestStream]) -> None:
        """Forget requests that are complete, in memory and in the store."""
        requests: list[tuple[str, str]] = []
        for stream in over:
            self._drop(stream)
            self._release(stream)
            self._unfetched.pop(stream, None)
            self._answered.pop(stream, None)
            streams = self._sessions.get(stream.session)
            # Unless a later request with the same id has taken its place, also in the store.
            if streams is not None and streams.find(stream.request) is None:
                requests.append((stream.session, stream.request))
        self._store.delete_requests(requests)

    def _is_newest(self, stream: RequestStream) -> bool:
        """Whether no later request of the session has the same id."""
        streams = self._sessions.get(stream.session)
        return streams is not None and streams.find(stream.request) is stream

    def _drop(self, stream: RequestStream) -> None:
        """Remove a complete stream from memory."""
        if stream in self._kept:
            del self._kept[stream]
            self._kept_bytes -= stream.size_bytes
            stream.clear()
        if (streams := self._sessions.get(stream.session)) is not None:
            streams.remove(stream)


class SessionStreams(EventStore):
    """The streams of one session. The SDK passes every message of the session to `store_event`."""

    def __init__(self, session: str, resumption: Resumption, owner: Owner) -> None:
        self._session = session
        self._owner = owner
        self._resumption = resumption
        # By the SDK's name of a stream, the request's id as text: for the SDK, 5 and "5" are the same.
        self._streams: dict[str, RequestStream] = {}
        self._in_progress = 0

    def __iter__(self) -> Iterator[RequestStream]:
        return iter(list(self._streams.values()))

    @property
    def generation(self) -> int:
        return self._resumption.generation

    def in_progress(self, request_id: int | str) -> RequestStream | None:
        """The stream of a request whose answer is still to come."""
        stream = self._streams.get(str(request_id))
        return None if stream is None or stream.complete else stream

    def find(self, request: str) -> RequestStream | None:
        """The stream of a request, by its JSON-RPC id as JSON."""
        stream = self._streams.get(_stream_id(request))
        return stream if stream is not None and stream.request == request else None

    def open(self, request_id: int | str, body: bytes, *, stored: bool = False) -> RequestStream | None:
        """A stream for a request that is about to be dispatched; None if it cannot be resumed.

        `stored`: the request is in the store already.
        """
        request = request_id_text(request_id)
        if len(request) > MAX_REQUEST_ID_BYTES or self._in_progress >= MAX_STREAMS:
            return None
        if len(self._streams) >= 2 * MAX_STREAMS:
            # Many at once, because that is one transaction.
            self._resumption.forget([stream for stream in self if stream.complete][:MAX_STREAMS])
        if not stored and not self._resumption.has_room(self._owner, body):
            return None
        stream = RequestStream(self._session, request, self._resumption.generation, self._resumption.answered)
        self._resumption.count(stream, self._owner, body)
        if not stored:
            self._resumption.insert(stream, body)
        self._streams.pop(str(request_id), None)
        self._streams[str(request_id)] = stream
        self._in_progress += 1
        return stream

    def answer(self, stream: RequestStream, message: bytes) -> str:
        """Keep the answer to a request in progress, a JSON-RPC message, and return the id of its event."""
        event_id = stream.add_answer(message)
        self._in_progress -= 1
        self._resumption.completed(stream)
        return event_id

    def abandon(self, stream: RequestStream) -> None:
        """Forget a request in progress, to which this server will have no answer. The store keeps it."""
        if not stream.complete:
            self._in_progress -= 1
            stream.end()
            self.remove(stream)

    def remove(self, stream: RequestStream) -> None:
        """Forget a stream, if it is here."""
        key = _stream_id(stream.request)
        if self._streams.get(key) is stream:
            del self._streams[key]

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        """Keep a message of a request that can be resumed, and return its id; "" for all others."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.complete or message is None:
            return ""
        if not isinstance(message, JSONRPCResponse | JSONRPCError):
            return stream.add_notification(message)
        return self.answer(stream, _encode(message))

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        """Unused: `sdk.SessionTransport` replays events without the SDK."""
        raise NotImplementedError


async def start_stream(send: Send, session: str, stream: RequestStream | None, generation: int = 0) -> None:
    """Send the head of a stream, and its priming event if there is a stream."""
    await send_event_head(send, (b"mcp-session-id", session.encode()))
    if stream is not None:
        await send_body(send, priming_event(stream, generation), more=True)


def priming_event(stream: RequestStream, generation: int) -> bytes:
    """The first event of a stream, with the id that a client comes back with."""
    return f"id: {_event_id(generation, 0, stream.request)}\r\ndata: \r\n\r\n".encode()


async def send_event_head(send: Send, *headers: tuple[bytes, bytes]) -> None:
    """Send the head of a response that is a stream of events."""
    await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM_HEADERS, *headers]})


async def send_single_answer(send: Send, session: str, answer: JSONRPCMessage | None) -> None:
    """Send a stream that has at most one event, an answer without an id."""
    await start_stream(send, session, None)
    await send_body(send, b"" if answer is None else event_frame(_encode(answer)), more=False)


def answer_unknown(event_id: EventId) -> JSONRPCMessage:
    """The answer to a request whose real answer was sent and is not kept any more."""
    # An error under the request's id: after an empty stream, clients wait until their time-out.
    message = "the answer to this request was sent before and is not kept any more"
    return _error(json.loads(event_id.request), message)


def conflicting_stream(session: str, request_id: int | str) -> RequestStream:
    """A stream that refuses a request with the id of another one that is in progress."""
    stream = RequestStream(session, request_id_text(request_id), 0, lambda stream: None)
    conflict = "another request with this id is in progress in this session"
    stream.add_answer(_encode(_error(request_id, conflict)))
    return stream


def _error(request_id: int | str, message: str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=request_id, error=ErrorData(code=INVALID_REQUEST, message=message))


def _encode(message: JSONRPCMessage) -> bytes:
    return message.model_dump_json(by_alias=True, exclude_unset=True).encode()


def event_frame(message: bytes, event_id: str | None = None) -> bytes:
    """An event with a JSON-RPC message, which must be on one line."""
    prefix = b"" if event_id is None else b"id: %b\r\n" % event_id.encode()
    return b"%bevent: message\r\ndata: %b\r\n\r\n" % (prefix, message)


async def send_body(send: Send, body: bytes, *, more: bool) -> None:
    """Send a part of a response's body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
