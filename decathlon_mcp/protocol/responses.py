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
from msgspec.structs import replace
from starlette.types import Receive, Send

from decathlon_mcp.background import name_event_loop
from decathlon_mcp.episodes.lease import Hold
from decathlon_mcp.episodes.state import NOT_READY
from decathlon_mcp.errors import LimitExceededError
from decathlon_mcp.protocol.messages import (
    CALL,
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
from decathlon_mcp.protocol.results import SESSIONLESS_STATUS, error_result, retry_after, wire_error
from decathlon_mcp.protocol.sessions import Session
from decathlon_mcp.types import JsonObject, as_json

CONNECTION_KEY = "decathlon.connection"
"""Key of the `Connection` in the ASGI scope."""
PING_SECONDS = 15.0
"""Time between two comments on a silent stream: clients and proxies close silent connections."""
PING = b": ping\r\n\r\n"
FAST_SECONDS = 0.25
"""A request that takes longer notices that its client is gone; before, watching costs more than it saves."""
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
    """The connection of a request, as far as it matters to one that waits for the response."""

    is_lost = False
    settled: asyncio.Event | None = None
    """Once the client has sent its last byte: set when it is known whether it still reads."""


class HttpRequest(Request):
    """One request, and its response.

    `start_soon` starts a task that watches a request which takes long. `resumed`: the client comes back for
    the answer, with this event's id. `starts_episode`: the request may start an episode, which only its reply
    makes known.
    """

    starts_episode = False
    _is_accepted = False
    _watching: anyio.CancelScope | None = None
    _hold: Hold | None = None
    _waits = False
    """Whether the episode that the request concerns was not ready when the request came."""
    _sends_events = False
    _is_answering = False
    _is_gone = False
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
        scope, self._receive, self._send = context.http
        self._connection: Connection | None = scope.get(CONNECTION_KEY)
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
        session, access, timer = self.session, self.context.access, None
        if access is not None:
            self._waits = access.episode.state.phase in NOT_READY
            self._hold = access.episode.lease.acquire(use=is_use)
        if session is not None:
            session.requests[self] = None
        if self.starts_episode or self._waits:
            self._start_soon(self.watch)
        else:
            name_event_loop()
            timer = asyncio.get_running_loop().call_later(FAST_SECONDS, self._start_soon, self.watch)
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
            self._is_answering = True
            if timer is not None:
                timer.cancel()
            if self._watching is not None:
                self._watching.cancel()
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

    async def watch(self) -> None:
        """Notice that the client is gone, and keep the connection busy."""
        if self._is_answering or self._watching is not None:
            return
        with anyio.CancelScope() as self._watching:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait_until_disconnected, self._receive, self._on_disconnect)
                while self.can_stream:
                    await anyio.sleep(PING_SECONDS - (0 if self._sends_events else FAST_SECONDS))
                    await self._send_event(PING)

    def _on_disconnect(self) -> None:
        if self._is_answering:
            return  # it has the answer
        self._lose_client()
        if self._watching is not None:
            self._watching.cancel()
        if self.session is None:
            self._scope.cancel()
        elif self._resumed is not None and any(
            other is not self and other.event_key == self.event_key for other in self.session.requests
        ):
            # A client that comes back again and again would leave a request each time.
            self._scope.cancel()

    def _lose_client(self) -> None:
        """The client is gone before it has the answer."""
        if self._is_gone:
            return
        self._is_gone = True
        if self._hold is None:
            self.context.abandon()
        elif self._hold.release(answered=False) and self._waits and self.context.access is not None:
            self.context.access.episode.lease.lose_client(until_ready=True)

    async def is_gone(self) -> bool:
        if self._is_gone:
            return True
        if self._connection is None:
            return await _is_disconnected(self._receive)
        if self._connection.settled is not None:
            await self._connection.settled.wait()
        return self._connection.is_lost

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
        left = self.starts_episode and await _is_disconnected(self._receive)
        if left or await self.is_gone():
            self._lose_client()
        self._is_answering = True
        if self._writing is not None:
            async with self._writing:
                pass  # a ping in progress
        if self._sends_events:
            if len(message) > MAX_EVENT_BYTES and not self._takes_long_events:
                message = self._too_long(len(message))
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
        return not (self._is_gone or (self._connection is not None and self._connection.is_lost))

    @property
    def _takes_long_events(self) -> bool:
        headers = self.context.headers
        return LARGE_EVENTS_HEADER in headers or headers.get(b"user-agent", b"").startswith(
            LARGE_EVENTS_AGENTS
        )

    def _too_long(self, size: int) -> bytes:
        limit = LimitExceededError(
            f"the reply has {size} bytes, more than the {MAX_EVENT_BYTES} that this client may take",
            limit_bytes=MAX_EVENT_BYTES,
        )
        if self.method == CALL:
            return self.answer(error_result(limit))
        return error_message(wire_error(limit), self.id)


def event_frame(message: bytes, event_id: EventId | None = None) -> bytes:
    """An event with a JSON-RPC message, which must be on one line."""
    prefix = b"" if event_id is None else b"id: %b\r\n" % str(event_id).encode()
    return b"%bevent: message\r\ndata: %b\r\n\r\n" % (prefix, message)


async def send_event_head(send: Send, session: Session | None) -> None:
    """Send the head of a response that is a stream of events."""
    headers = [*_EVENT_STREAM_HEADERS, *_session_header(session)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


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
    if session is None or session.id is None or not session.is_open:
        return ()
    return ((b"mcp-session-id", session.id.encode("ascii")),)


async def send_body(send: Send, body: bytes, *, more: bool) -> None:
    """Send a part of a response's body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _is_disconnected(receive: Receive) -> bool:
    """Whether the client of a request, whose body has been read, is gone or has the whole response."""
    # What comes next is the disconnect, without waiting if it has come.
    with anyio.CancelScope() as scope:
        scope.cancel()
        return (await receive())["type"] == "http.disconnect"
    return False


async def wait_until_disconnected(receive: Receive, on_gone: Callable[[], object]) -> None:
    """Wait until the client is gone or has the whole response, then call `on_gone`."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()
