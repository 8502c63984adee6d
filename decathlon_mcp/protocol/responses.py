"""A request over HTTP with its response, from the first byte that is sent to the last.

What a service answers is the same for every form of response. The form is decided here:

- In a session whose client can come back for an answer: events, the first of which has the id that it comes
  back with. Losing the connection changes nothing.
- In another session: one JSON body, or events if the client asked for progress or the answer can take long.
- Without a session: one JSON body, or events once there is something to send before the answer. A disconnect
  cancels the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count

import anyio
import anyio.lowlevel
from msgspec.structs import replace
from starlette.types import Send

from decathlon_mcp.background import name_event_loop
from decathlon_mcp.episodes.lease import Hold
from decathlon_mcp.episodes.state import NOT_READY
from decathlon_mcp.protocol.messages import (
    INITIALIZE,
    MAX_REQUEST_ID_BYTES,
    REQUEST_CANCELLED,
    EventId,
    Kind,
    McpError,
    Message,
    request_id_text,
)
from decathlon_mcp.protocol.requests import (
    Request,
    RequestContext,
    Respond,
    error_message,
    prefers_events,
)
from decathlon_mcp.protocol.results import SESSIONLESS_STATUS, retry_after
from decathlon_mcp.protocol.sessions import Session
from decathlon_mcp.types import JsonObject, as_json

CONNECTION_KEY = "decathlon.connection"
"""Key of the `Connection` in the ASGI scope."""
PING_SECONDS = 15.0
"""Time between two comments on a silent stream: clients and proxies close silent connections."""
PING = b": ping\r\n\r\n"
LOOKS = 3
"""Iterations of the event loop in which it reads what a connection has received."""
MAX_EVENT_BYTES = (1 << 20) - 1024
"""Longest answer in an event. The Python SDK (2.1 and later) ends its session, and all calls, over 1 MiB."""
LARGE_EVENTS_HEADER = b"decathlon-large-events"
"""Header of clients that take an event of any length: `decathlon_client` and its bridge."""
LARGE_EVENTS_AGENTS = (b"node", b"undici", b"Bun/", b"Deno/", b"python-httpx/")
"""Beginnings of the `User-Agent` of clients that do: the TypeScript SDKs, and the Python SDK 1.x."""
LEAVING_SECONDS = 0.5
"""How long the answer to a cancelled request waits for its client to leave. The Python client often closes
its connection after a cancellation, and complains of an answer that comes while it does."""
LEAVING_CHECKS = 10
_EVENT_STREAM_HEADERS = (
    (b"cache-control", b"no-cache, no-transform"),
    (b"connection", b"keep-alive"),
    (b"content-type", b"text/event-stream"),
    (b"x-accel-buffering", b"no"),
)
_numbers = count(1)
"""Numbers of responses, none of which is given twice by one process."""


class Connection:
    """The connection of a request, as far as it matters to a request that waits for the response."""

    is_lost = False
    settled: asyncio.Event | None = None
    """Once the client has sent its last byte: set when it is known whether it still reads."""
    on_lost: Callable[[], object] | None = None
    """Set by the request in progress."""

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Call `on_lost` when the connection is lost; now, if it is."""
        self.on_lost = on_lost
        if self.is_lost:
            on_lost()

    async def is_gone(self) -> bool:
        """Whether it is lost, once that is known of a client that has sent its last byte."""
        if self.settled is not None:
            await self.settled.wait()
        return self.is_lost

    def lose(self) -> None:
        """The connection is lost."""
        self.is_lost = True
        if self.settled is not None:
            self.settled.set()
        if self.on_lost is not None:
            self.on_lost()


class HttpRequest(Request):
    """One request, and its response.

    `start_soon` starts a task that sends something meanwhile. `resumed`: the client comes back for the
    answer, with this event's id. `starts_episode`: the request may start an episode, which only its reply
    makes known.
    """

    starts_episode = False
    _is_accepted = False
    _pings: asyncio.TimerHandle | None = None
    _hold: Hold | None = None
    _waits = False
    """Whether the episode that the request concerns was not ready when the request came."""
    _sends_events = False
    _is_answering = False
    _session_ended = False
    _writing: anyio.Lock | None = None

    def __init__(
        self,
        message: Message,
        context: RequestContext,
        session: Session | None,
        version: str,
        *,
        start_soon: Callable[..., object],
        resumed: EventId | None = None,
    ) -> None:
        super().__init__(message, context, session, version)
        scope, _, self._send = context.http
        self._connection: Connection = scope[CONNECTION_KEY]
        self._start_soon = start_soon
        self._scope = anyio.CancelScope()
        self._takes_events = context.headers.accepts[1]
        self._resumed = self._event = resumed
        """The event id with which the client comes back. Its `kind` is unknown until `accepted` is called."""
        if session is None:
            self.can_stream = self._takes_events
            return
        context.may_return = self._takes_events and message.method != INITIALIZE and session.generation != 0
        self.can_stream = self._takes_events and (context.may_return or prefers_events(message))
        if context.may_return and resumed is None and len(request_id_text(self.id)) <= MAX_REQUEST_ID_BYTES:
            self._event = EventId(session.generation, next(_numbers), Kind.OTHER, self.id)

    async def serve(self, respond: Respond, *, is_use: bool = True) -> None:
        """Send the response: what `respond` returns, or the error that it raises.

        The lease of the episode that the request concerns does not expire meanwhile. `is_use`: the request is
        a use of the episode.
        """
        session, access, connection = self.session, self.context.access, self._connection
        if access is not None:
            self._waits = access.episode.state.phase in NOT_READY
            self._hold = access.episode.lease.acquire(use=is_use)
        if session is not None:
            session.requests[self] = None
        connection.watch(self._on_lost)
        self._ping_later()
        answer, was_answered = None, False
        try:
            with self._scope:
                if self._resumed is not None:
                    await self.accepted(self._resumed.kind, agent=self._resumed.agent)
                answer = await self.outcome(respond)
            if answer is None and session is not None:
                answer = await self._cancelled()
            if answer is not None:
                was_answered = await self._answer(*answer)
        finally:
            self._is_answering, connection.on_lost = True, None
            if self._pings is not None:
                self._pings.cancel()
            if session is not None:
                session.used_at = time.monotonic()
            self.end(handed_over=was_answered)
            if self._hold is not None:
                self._hold.release(answered=was_answered)
            if self.starts_episode and not was_answered and not self.context.abandoned:
                self.context.abandon()

    def cancel(self, *, session_ended: bool = False) -> None:
        self._session_ended = self._session_ended or session_ended
        self._scope.cancel()

    # the client

    def _on_lost(self) -> None:
        """The client is gone before it has the answer."""
        if self._is_answering:
            return
        note_client_gone(self.context, self._hold, waits=self._waits)
        if self.session is None:
            self._scope.cancel()
        elif self._resumed is not None and any(
            other is not self and other.event_key == self.event_key for other in self.session.requests
        ):
            # A client that comes back again and again would leave a request each time.
            self.is_replaced = True
            self._scope.cancel()

    async def is_gone(self) -> bool:
        return await self._connection.is_gone()

    def _ping_later(self) -> None:
        """Keep the connection busy as long as the request takes."""
        if self.can_stream:
            name_event_loop()
            self._pings = asyncio.get_running_loop().call_later(PING_SECONDS, self._start_soon, self._ping)

    async def _ping(self) -> None:
        await self._send_event(PING)
        if not self._is_answering:
            self._ping_later()

    # what comes before the answer

    @property
    def event_key(self) -> str | None:
        return None if self._event is None else self._event.key

    async def accepted(self, kind: Kind, *, agent: str = "") -> None:
        if self._event is not None and not self._is_accepted:
            self._event = replace(self._event, kind=kind, agent=agent)
            self._is_accepted = True
            await self._send_event(b"id: %b\r\ndata: \r\n\r\n" % str(self._event).encode())

    async def notify(self, method: str, params: JsonObject, *, with_reply: bool = True) -> None:
        notification = {"jsonrpc": "2.0", "method": method, "params": params}
        if with_reply and self.can_stream:
            await self._send_event(event_frame(as_json(notification)))
        elif self.session is not None:
            self.session.send(as_json(notification))

    async def _send_event(self, frame: bytes) -> None:
        self._writing = self._writing or anyio.Lock(fast_acquire=True)
        async with self._writing:
            if self._is_answering or not self._takes_events:
                return
            if not self._sends_events:
                self._sends_events = True
                await send_event_head(self._send, self.session)
            await send_body(self._send, frame, more=True)

    # the answer

    async def _cancelled(self) -> tuple[bytes, McpError | None]:
        """The answer to a request of a session that was cancelled."""
        error = McpError(REQUEST_CANCELLED, "the session was ended before the request was answered")
        if not self._session_ended:
            for _ in range(LEAVING_CHECKS):
                if await self.is_gone():
                    break
                await anyio.sleep(LEAVING_SECONDS / LEAVING_CHECKS)
            # With an event before it, the answer is one as well: a JSON body that comes while the Python
            # client closes its connection fails the whole client (`_handle_json_response` of mcp 2.3.0).
            await self._send_event(PING)
            error = McpError(REQUEST_CANCELLED, "Request cancelled")
        return error_message(error, self.id), error

    async def _answer(self, message: bytes, error: McpError | None) -> bool:
        """Send the answer. Returns whether all of it was handed over while the client was there."""
        # A client that starts an episode may have left before this server has looked: nobody else knows of
        # the episode. What the connection says about that is read while this waits.
        for _ in range(LOOKS if self.starts_episode else 0):
            await anyio.lowlevel.checkpoint()
        await self.is_gone()
        self._is_answering = True
        if self._writing is not None:
            async with self._writing:
                pass  # a ping in progress
        if self._sends_events:
            if len(message) > MAX_EVENT_BYTES and not self._takes_long_events:
                message = self.too_long(len(message), MAX_EVENT_BYTES, "this client may take")
            event_id = None
            if self._event is not None and self._is_accepted:
                event_id = replace(self._event, is_answer=True)
            await send_body(self._send, event_frame(message, event_id), more=False)
        else:
            status, headers = 200, ()
            if error is not None:
                status = SESSIONLESS_STATUS.get(error.code, 200) if self.session is None else 200
                if (seconds := retry_after(error)) is not None:
                    headers = ((b"retry-after", seconds.encode()),)
            await send_whole(self._send, message, status=status, session=self.session, headers=headers)
        return not self._connection.is_lost

    @property
    def _takes_long_events(self) -> bool:
        headers = self.context.headers
        return LARGE_EVENTS_HEADER in headers or headers.get(b"user-agent", b"").startswith(
            LARGE_EVENTS_AGENTS
        )


def event_frame(message: bytes, event_id: EventId | None = None) -> bytes:
    """An event with a JSON-RPC message, which must be on one line."""
    prefix = b"" if event_id is None else b"id: %b\r\n" % str(event_id).encode()
    return b"%bevent: message\r\ndata: %b\r\n\r\n" % (prefix, message)


async def send_event_head(send: Send, session: Session | None) -> None:
    """Send the head of a response that is a stream of events."""
    headers = [*_EVENT_STREAM_HEADERS, *_session_header(session)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


def note_client_gone(context: RequestContext, hold: Hold | None, *, waits: bool) -> None:
    """The client of a response is gone: end what it started, or its hold of an episode.

    `waits`: whether the episode was not ready when the request came.
    """
    if hold is None:
        context.abandon()
    elif hold.release(answered=False) and waits and context.access is not None:
        context.access.episode.lease.lose_client(until_ready=True)


async def send_whole(
    send: Send,
    message: bytes = b"",
    *,
    status: int = 200,
    session: Session | None = None,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """Send a whole response: a line of JSON, or an empty body."""
    message += b"\n" if message else b""
    head = [(b"content-length", b"%d" % len(message)), *_session_header(session), *headers]
    if message:
        head.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send_body(send, message, more=False)


def _session_header(session: Session | None) -> tuple[tuple[bytes, bytes], ...]:
    if session is None or session.id is None or session.sessions is None:
        return ()
    return ((b"mcp-session-id", session.id.encode("ascii")),)


async def send_body(send: Send, body: bytes, *, more: bool) -> None:
    """Send a part of a response's body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})
