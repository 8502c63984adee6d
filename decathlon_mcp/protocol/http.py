"""MCP over streamable HTTP: from a checked request to the last byte of its response.

What a service answers is the same for every form of response. The form is decided here:

- In a session whose client can come back for an answer: events, the first of which has the id that it comes
  back with. Losing the connection changes nothing.
- In another session: one JSON body, or events if the client asked for progress or the answer can take long.
- Without a session: one JSON body, or events once there is something to send before the answer. A disconnect
  cancels the request.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Protocol

import anyio
import anyio.to_thread
from msgspec import Raw
from msgspec.structs import replace
from starlette.requests import Request as StarletteRequest
from starlette.types import Receive, Scope, Send

from decathlon_mcp.background import LazyTimer, background_tasks, run_alone
from decathlon_mcp.episodes.access import EpisodeAccess
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.lease import Hold
from decathlon_mcp.episodes.operations import check_operation
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import NOT_READY
from decathlon_mcp.errors import AtCapacityError, LimitExceededError
from decathlon_mcp.protocol.messages import (
    BATCH_VERSION,
    CALL,
    CANCELLED,
    CAPABILITIES_KEY,
    DISCOVER,
    HANDSHAKE_VERSIONS,
    INITIALIZE,
    INVALID_REQUEST,
    LIST,
    MAX_BATCH,
    MAX_REQUEST_ID_BYTES,
    OPERATION_KEY,
    REQUEST_CANCELLED,
    SESSIONLESS_VERSIONS,
    UNSUPPORTED_VERSION,
    VERSION_KEY,
    EventId,
    Kind,
    McpError,
    Message,
    Params,
    RequestId,
    read_message,
    request_id_text,
)
from decathlon_mcp.protocol.requests import (
    SCOPE_KEY,
    START_TOOL,
    Request,
    RequestContext,
    Respond,
    Result,
    Service,
    error_message,
    prefers_events,
)
from decathlon_mcp.protocol.results import error_result, wire_error
from decathlon_mcp.protocol.sessions import Session, Sessions, Stream
from decathlon_mcp.protocol.stdio import LineRequest
from decathlon_mcp.types import JsonObject, as_json, as_object

CONNECTION_KEY = "decathlon.connection"
"""Key of the `Connection` in the ASGI scope."""
EPISODE_KEY = "decathlon/episode"
"""Key in the `_meta` of a `notifications/cancelled` at the lobby with the episode of the operation."""
PING_SECONDS = 15.0
"""Time between two comments on a silent stream: clients and proxies close silent connections."""
PING = b": ping\r\n\r\n"
FAST_SECONDS = 0.25
"""A request that takes longer notices that its client is gone; before, watching costs more than it saves."""
MAX_WAITING = 256
"""Requests of one session that wait for their answers."""
MAX_EVENT_BYTES = (1 << 20) - 1024
"""Longest answer in an event. The Python SDK (2.1 and later) ends its session, and all calls, over 1 MiB."""
LARGE_EVENTS_HEADER = "Decathlon-Large-Events"
"""Header of clients that take an event of any length: `decathlon_client` and its bridge."""
LARGE_EVENTS_AGENTS = ("node", "undici", "Bun/", "Deno/", "python-httpx/")
"""Beginnings of the `User-Agent` of clients that do: the TypeScript SDKs, and the Python SDK 1.x."""
LEAVING_SECONDS = 0.5
"""How long the answer to a cancelled request waits for its client to leave. The Python client often closes
its connection after a cancellation, and complains of an answer that comes while it does."""
LEAVING_CHECKS = 10
END_STREAM_SECONDS = 1.0
"""Time after which the first GET stream of a revived session is ended. Clients of the Python SDK give up a
stream that broke twice, unless it ended by itself in between."""
MAX_KNOWN_HEADERS = 256
MAX_KNOWN_HEADER_BYTES = 512
_EVENT_STREAM_HEADERS = (
    (b"cache-control", b"no-cache, no-transform"),
    (b"connection", b"keep-alive"),
    (b"content-type", b"text/event-stream"),
    (b"x-accel-buffering", b"no"),
)
_STATUS = {-32700: 400, -32600: 400, -32602: 400, -32601: 404, -32020: 400, -32021: 400, -32022: 400}
"""HTTP status by the code of an error, in revisions without sessions; 200 for all others."""
SESSION, VERSION = b"mcp-session-id", b"mcp-protocol-version"
_METHOD, _NAME = b"mcp-method", b"mcp-name"
_NAMED = {CALL: "name", "prompts/get": "name", "resources/read": "uri"}
"""Methods whose requests name something, which the header `Mcp-Name` repeats."""


class Connection(Protocol):
    """The connection of a request, as far as it matters to one that waits for the response."""

    is_lost: bool

    async def settled(self) -> None:
        """If the client has sent its last byte, wait until it is known whether it still reads."""
        ...


class HttpError(McpError):
    """An error with this status of the response, which no setting of the client can change."""

    def __init__(self, status: int, code: int, message: str, *, request_id: RequestId | None = None) -> None:
        super().__init__(code, message, request_id=request_id)
        self.status = status


class Headers(dict[bytes, bytes]):
    """The headers of a request by their names; of a repeated one the first value. Without spaces around."""

    # RFC 9110, section 5.5: spaces around a value are not part of it. httptools keeps those after it.
    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.repeated: set[bytes] = set()
        for name, value in scope["headers"]:
            if name in self:
                self.repeated.add(name)
            else:
                self[name] = value.strip(b" \t")

    def text(self, name: bytes) -> str | None:
        value = self.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def accepts(self) -> tuple[bool, bool]:
        """Whether the client takes JSON, and events."""
        accept = self.get(b"accept", b"")
        if (known := _accepted.get(accept)) is None:
            known = _media_types(accept.decode("latin-1"))
            if len(accept) <= MAX_KNOWN_HEADER_BYTES:
                if len(_accepted) >= MAX_KNOWN_HEADERS:
                    _accepted.clear()
                _accepted[accept] = known
        return known

    @property
    def is_sessionless(self) -> bool:
        """Whether they name a revision without sessions, or one that is not known."""
        version = self.text(VERSION)
        return version is not None and version not in HANDSHAKE_VERSIONS


_accepted: dict[bytes, tuple[bool, bool]] = {}
"""What was read of the headers `Accept`: a client's is always the same."""


def _media_types(accept: str) -> tuple[bool, bool]:
    # RFC 9110, section 8.3.1: media types are case-insensitive.
    types = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    return (
        bool(types & {"application/json", "application/*", "*/*"}),
        bool(types & {"text/event-stream", "text/*", "*/*"}),
    )


class Watch:
    """Has every request watched that takes longer than FAST_SECONDS."""

    # One timer for all: a timer of the event loop for each costs more than most of what a call needs.
    def __init__(self, start_soon: Callable[..., object]) -> None:
        self._start_soon = start_soon
        self._timer = LazyTimer(self._look)
        # Those that are not watched yet, and when they began; the oldest is first.
        self._unwatched: dict[HttpRequest, float] = {}

    def add(self, request: HttpRequest, *, at_once: bool) -> None:
        """A request begins."""
        if at_once:
            self._start_soon(request.watch)
            return
        began_at = asyncio.get_running_loop().time()
        if not self._unwatched:
            self._timer.set(began_at + FAST_SECONDS)
        self._unwatched[request] = began_at

    def remove(self, request: HttpRequest) -> None:
        """A request has ended."""
        self._unwatched.pop(request, None)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        for request, began_at in list(self._unwatched.items()):
            if began_at + FAST_SECONDS > now:
                self._timer.set(began_at + FAST_SECONDS)
                return
            del self._unwatched[request]
            self._start_soon(request.watch)


class HttpRequest(Request):
    """One request, and its response.

    `generation`: of this server, if the client can come back for the answer; else 0. `resumed`: it has done
    so, with this event's id.
    """

    def __init__(
        self,
        message: Message,
        context: RequestContext,
        session: Session | None,
        version: str,
        *,
        watch: Watch,
        asgi: tuple[Scope, Receive, Send],
        takes_events: bool,
        generation: int = 0,
        resumed: EventId | None = None,
    ) -> None:
        returns = takes_events and session is not None and session.can_return and generation != 0
        super().__init__(
            message,
            context,
            session,
            version,
            can_stream=takes_events and (returns or session is None or prefers_events(message)),
        )
        self.resumed = resumed
        self.starts_episode = False
        """Whether it may start an episode, which only its reply makes known."""
        self.watched = False
        """Whether it is noticed from the beginning that the client is gone."""
        self.on_gone: Callable[[], object] = context.abandon
        """Called once if the client leaves before it has the answer."""
        self.answered = False
        """Whether the whole response was handed over while the client was there."""
        context.may_return = returns
        self._event: tuple[int, int] | None = None
        """What names the response: the generation of a server, and a number."""
        if resumed is not None:
            self._event = (resumed.generation, resumed.number)
        elif returns and len(request_id_text(message.id)) <= MAX_REQUEST_ID_BYTES:
            self._event = (generation, next(_numbers))
        self._watch = watch
        self._takes_events = takes_events
        self._http_scope, self._receive, self._send = asgi
        self._connection: Connection | None = self._http_scope.get(CONNECTION_KEY)
        self._scope = anyio.CancelScope()
        self._watching: anyio.CancelScope | None = None
        self._event_id: EventId | None = None
        self._sends_events = False
        self._is_answering = False
        self._is_gone = False
        self._session_ended = False
        self._writing: anyio.Lock | None = None

    async def serve(self, respond: Respond) -> None:
        """Send the response: what `respond` returns, or the error that it raises."""
        session = self.session
        if session is not None:
            session.requests[self] = None
        self._watch.add(self, at_once=self.watched)
        try:
            answer: tuple[bytes, McpError | None] | None = None
            with self._scope:
                if self.resumed is not None:
                    await self.accepted(self.resumed.kind, agent=self.resumed.agent)
                answer = await self.outcome(self._refuse_too_many if self._is_one_too_many else respond)
            if answer is not None:
                await self._answer(*answer)
            elif session is not None:
                await self._answer(*await self._cancelled())
        finally:
            self._is_answering = True
            self._watch.remove(self)
            if self._watching is not None:
                self._watching.cancel()
            if session is not None:
                session.requests.pop(self, None)
                session.used_at = time.monotonic()
            self.drop_call(handed_over=self.answered)

    def cancel(self, *, session_ended: bool = False) -> None:
        """End the request: its client has cancelled it, or the session ends."""
        self._session_ended = self._session_ended or session_ended
        self._scope.cancel()

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
        elif self.resumed is not None and any(
            other is not self and other.event_key == self.event_key for other in self.session.requests
        ):
            # A client that comes back again and again would leave a request each time.
            self._scope.cancel()

    def _lose_client(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            self.on_gone()

    # as `Request`

    @property
    def event_key(self) -> str | None:
        return None if self._event is None else f"{self._event[0]}.{self._event[1]}"

    @property
    def base_url(self) -> str | None:
        return self.context.public_url or str(StarletteRequest(self._http_scope).base_url).rstrip("/")

    @property
    def is_http(self) -> bool:
        return True

    def http_header(self, name: str) -> str | None:
        return Headers(self._http_scope).text(name.encode())

    async def accepted(self, kind: Kind, *, agent: str = "") -> None:
        if self._event is None or self._event_id is not None:
            return
        self._event_id = EventId(*self._event, kind, self.id, agent)
        await self._send_event(b"id: %b\r\ndata: \r\n\r\n" % str(self._event_id).encode())

    async def notify(self, method: str, params: JsonObject, *, with_reply: bool = True) -> None:
        notification = {"jsonrpc": "2.0", "method": method, "params": params}
        if with_reply and self.can_stream:
            await self._send_event(event_frame(as_json(notification)))
        elif self.session is not None:
            self.session.send(notification)

    async def is_gone(self) -> bool:
        if self._is_gone:
            return True
        if self._connection is None:
            return await _is_disconnected(self._receive)
        await self._connection.settled()
        return self._connection.is_lost

    # the response

    @property
    def _is_one_too_many(self) -> bool:
        return self.session is not None and len(self.session.requests) > MAX_WAITING

    async def _refuse_too_many(self, _request: Request) -> Result:
        raise AtCapacityError(
            f"{MAX_WAITING} requests of this session wait for their answers", retryAfterSeconds=1.0
        )

    async def _cancelled(self) -> tuple[bytes, McpError | None]:
        if self._session_ended:
            error = McpError(REQUEST_CANCELLED, "the session was ended before the request was answered")
            return error_message(error, self.id), error
        for _ in range(LEAVING_CHECKS):
            if await self.is_gone():
                break
            await anyio.sleep(LEAVING_SECONDS / LEAVING_CHECKS)
        # With an event before it, the answer is one as well: a JSON body that comes while the Python client
        # closes its connection fails the whole client (`_handle_json_response` of mcp 2.3.0).
        await self._send_event(PING)
        error = McpError(REQUEST_CANCELLED, "Request cancelled")
        return error_message(error, self.id), error

    async def _answer(self, message: bytes, error: McpError | None) -> None:
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
            event_id = None if self._event_id is None else replace(self._event_id, is_answer=True)
            await send_body(self._send, event_frame(message, event_id), more=False)
        else:
            status = _STATUS.get(error.code, 200) if error is not None and self.session is None else 200
            await send_json(self._send, message, status=status, session=self.session, headers=_retry(error))
        is_lost = self._connection is not None and self._connection.is_lost
        self.answered = not (self._is_gone or is_lost)

    @property
    def _takes_long_events(self) -> bool:
        agent = self.http_header("user-agent") or ""
        is_announced = self.http_header(LARGE_EVENTS_HEADER.lower()) is not None
        return is_announced or agent.startswith(LARGE_EVENTS_AGENTS)

    def _too_long(self, size: int) -> bytes:
        limit = LimitExceededError(
            f"the reply has {size} bytes, more than the {MAX_EVENT_BYTES} that this client may take",
            limit_bytes=MAX_EVENT_BYTES,
        )
        if self.method == CALL:
            return self.answer(error_result(limit))
        return error_message(wire_error(limit), self.id)

    async def _send_event(self, frame: bytes) -> None:
        """Send what comes before the answer."""
        self._writing = self._writing or anyio.Lock(fast_acquire=True)
        async with self._writing:
            if self._is_answering or not self._takes_events:
                return
            if not self._sends_events:
                self._sends_events = True
                await send_event_head(self._send, self.session)
            await send_body(self._send, frame, more=True)


_numbers = count(1)
"""Numbers of responses, none of which is given twice by one process."""


def _retry(error: McpError | None) -> tuple[tuple[bytes, bytes], ...]:
    """The header for an error that says when to try again."""
    data = None if error is None else as_object(error.data)
    if data is None or data.get("code") != "at_capacity" or "retryAfterSeconds" not in data:
        return ()
    return ((b"retry-after", b"%.0f" % data["retryAfterSeconds"]),)


class McpAddress:
    """Serves MCP for the addresses of one kind."""

    def __init__(self, service: Service, sessions: Sessions, watch: Watch, registry: EpisodeRegistry) -> None:
        self.service = service
        self.sessions = sessions
        self._watch = watch
        self._registry = registry

    async def post(
        self,
        message: Message,
        context: RequestContext,
        headers: Headers,
        asgi: tuple[Scope, Receive, Send],
    ) -> None:
        """Serve a message. Raises McpError and DecathlonError for one that is refused before."""
        request_id = message.id if message.is_request else None
        takes_json, takes_events = headers.accepts
        if headers.is_sessionless:
            if not (takes_json and takes_events):
                raise _not_acceptable(request_id)
            await self._post_sessionless(message, context, headers, asgi)
            return
        if not takes_json:
            raise _not_acceptable(request_id)
        session = self._session_of(headers, context, request_id, opens=message.method == INITIALIZE)
        if not message.is_request:
            assert session is not None
            self._on_notification(message, context, session)
            await _accept(asgi[2], session)
            return
        if message.method == INITIALIZE:
            await self._initialize(message, context, session, asgi, takes_events=takes_events)
            return
        assert session is not None
        request = HttpRequest(
            message,
            context,
            session,
            session.version,
            watch=self._watch,
            asgi=asgi,
            takes_events=takes_events,
            generation=self.sessions.generation,
        )
        request.starts_episode = request.name == START_TOOL and context.access is None
        await self._serve(request, self.service.respond, asgi[0])

    async def post_batch(
        self,
        items: list[Raw],
        context: RequestContext,
        headers: Headers,
        asgi: tuple[Scope, Receive, Send],
    ) -> None:
        """Serve a batch: one body with all answers. Raises HttpError where there are none."""
        session = None if headers.is_sessionless else self._session_of(headers, context, None)
        if session is None or session.version != BATCH_VERSION:
            raise HttpError(
                400, INVALID_REQUEST, f"the body must be one JSON-RPC message: batches are of {BATCH_VERSION}"
            )
        if not 1 <= len(items) <= MAX_BATCH:
            raise HttpError(400, INVALID_REQUEST, f"a batch has 1 to {MAX_BATCH} messages")
        answers: list[bytes] = []

        async def serve(message: Message) -> None:
            request = LineRequest(message, context, session, session.version, session.send)
            if (answer := await request.serve(self.service.respond)) is not None:
                answers.append(answer)

        access = context.access
        hold = None if access is None else access.episode.lease.acquire()
        try:
            async with anyio.create_task_group() as tasks:
                for item in items:
                    try:
                        message = read_message(item)
                    except McpError as error:
                        answers.append(error_message(error, error.request_id))
                        continue
                    if message.method == INITIALIZE and message.is_request:
                        error = McpError(INVALID_REQUEST, "`initialize` is in no batch")
                        answers.append(error_message(error, message.id))
                    elif message.is_request:
                        tasks.start_soon(serve, message)
                    else:
                        self._on_notification(message, context, session)
        finally:
            if hold is not None:
                hold.release()
        self.sessions.save(session)
        if answers:
            await send_json(asgi[2], b"[%b]" % b",".join(answers), session=session)
        else:
            await _accept(asgi[2], session)

    async def get(self, context: RequestContext, headers: Headers, asgi: tuple[Scope, Receive, Send]) -> None:
        """Serve a session's stream, or a client that comes back for an answer. Raises HttpError."""
        session = self._session_of(headers, context, None)
        assert session is not None
        if not headers.accepts[1]:
            raise HttpError(406, INVALID_REQUEST, "Not Acceptable: Client must accept text/event-stream")
        last = headers.text(b"last-event-id")
        if not last:
            await self._serve_stream(context, session, asgi)
            return
        event_id = EventId.parse(last)
        if event_id is None or not session.can_return:
            raise HttpError(400, INVALID_REQUEST, "Last-Event-ID: this is no id of an event of this server")
        if event_id.is_answer:
            # That was all.
            await send_event_head(asgi[2], session)
            await send_body(asgi[2], b"", more=False)
            return
        method = LIST if event_id.kind is Kind.LIST else CALL
        request = HttpRequest(
            Message(id=event_id.request, method=method, params=Params(name="")),
            context,
            session,
            session.version,
            watch=self._watch,
            asgi=asgi,
            takes_events=True,
            generation=self.sessions.generation,
            resumed=event_id,
        )
        request.starts_episode = event_id.kind is Kind.START
        await self._serve(request, self.service.respond_again(event_id.kind, event_id.agent), asgi[0])

    async def delete(
        self, context: RequestContext, headers: Headers, asgi: tuple[Scope, Receive, Send]
    ) -> None:
        """End a session. Raises HttpError."""
        session = self._session_of(headers, context, None)
        assert session is not None
        self.sessions.end(session)
        await send_json(asgi[2], b"", session=session)

    def _session_of(
        self, headers: Headers, context: RequestContext, request_id: RequestId | None, *, opens: bool = False
    ) -> Session | None:
        """The session that a request names. Raises HttpError; None for one that `opens` a session."""
        session_id = headers.text(SESSION)
        if session_id is None:
            if opens and request_id is not None:
                return None
            raise HttpError(400, INVALID_REQUEST, "Bad Request: Missing session ID", request_id=request_id)
        session = self.sessions.find(session_id, context)
        if session is None:
            # The same for a session of another path or token: a client must not be able to tell. On 404 it
            # initializes a new session, as the protocol requires; 403 would make it give up.
            raise HttpError(404, INVALID_REQUEST, "Session not found", request_id=request_id)
        if context.access is None and self.service.ends_with_session:
            context.access = session.access
        return session

    # sessions

    async def _initialize(
        self,
        message: Message,
        context: RequestContext,
        session: Session | None,
        asgi: tuple[Scope, Receive, Send],
        *,
        takes_events: bool,
    ) -> None:
        params = message.params or Params()
        requested = params.protocol_version
        version = requested if requested in HANDSHAKE_VERSIONS else HANDSHAKE_VERSIONS[-1]
        make = partial(HttpRequest, watch=self._watch, asgi=asgi, takes_events=takes_events)
        if session is not None:
            await self._serve(make(message, context, session, version), self.service.respond, asgi[0])
            return
        share = self.sessions.refuse_if_full(context)
        client_params: JsonObject = {
            "protocolVersion": requested,
            "capabilities": params.capabilities,
            "clientInfo": params.client_info,
        }
        opened = self.sessions.create(version, client_params, context)

        async def respond(request: Request) -> Result:
            result = await self.service.respond(request)
            opened.access = context.access if self.service.ends_with_session else None
            self.sessions.add(opened, share)
            return result

        request = make(message, context, opened, version)
        request.starts_episode = self.service.ends_with_session
        await self._serve(request, respond, asgi[0])
        if context.abandoned:
            self.sessions.end(opened)

    def _on_notification(self, message: Message, context: RequestContext, session: Session | None) -> None:
        """Serve a notification. Raises BadRequestError, UnknownEpisodeError."""
        if context.access is not None:
            # At a task's address clients send some before they know whether anybody will play.
            context.access.episode.lease.acquire(use=not self.service.ends_with_session).release()
        if message.method != CANCELLED:
            return
        if OPERATION_KEY in message.meta:
            self._cancel_call(message.meta, context)
        if session is not None and message.params is not None:
            session.cancel(message.params.request_id)

    def _cancel_call(self, meta: JsonObject, context: RequestContext) -> None:
        """Cancel the call of the operation that a notification names, at the lobby with its episode."""
        operation, access = check_operation(meta[OPERATION_KEY]), context.access
        if access is None:
            access = self._registry.access(str(meta.get(EPISODE_KEY)), context.principal)
        access.episode.calls.cancel(operation)

    async def _serve_stream(
        self, context: RequestContext, session: Session, asgi: tuple[Scope, Receive, Send]
    ) -> None:
        """Serve a session's own stream until its client leaves, or it is ended."""
        _, receive, send = asgi
        access = context.access
        hold = None if access is None else access.episode.lease.acquire()
        stream = session.open_stream()
        timer = LazyTimer(stream.end)
        if session.ends_stream:
            session.ends_stream = False
            timer.set(asyncio.get_running_loop().time() + END_STREAM_SECONDS)
        try:
            await send_event_head(send, session)
            async with background_tasks() as tasks:
                tasks.start_soon(run_alone, wait_until_disconnected, receive, stream.lose)
                await _send_messages(stream, send)
            if not stream.is_lost:
                await send_body(send, b"", more=False)
        finally:
            timer.stop()
            session.close_stream(stream)
            if hold is not None:
                hold.release(answered=not stream.is_lost)
        if stream.is_lost and access is not None and self.service.ends_with_session and not session.streams:
            # A client that dies loses all its connections.
            access.episode.lease.lose_client()

    # without sessions

    async def _post_sessionless(
        self,
        message: Message,
        context: RequestContext,
        headers: Headers,
        asgi: tuple[Scope, Receive, Send],
    ) -> None:
        version = headers.text(VERSION) or ""
        if not message.is_request:
            if message.is_response:
                raise HttpError(400, INVALID_REQUEST, "the body must be one JSON-RPC request or notification")
            if version not in SESSIONLESS_VERSIONS:
                raise unsupported_version(version)
            self._on_notification(message, context, None)
            await _accept(asgi[2], None)
            return
        if not _agrees(message, headers):
            await _check_routing(message, headers)
        request = HttpRequest(
            message, context, None, version, watch=self._watch, asgi=asgi, takes_events=True
        )
        if request.method == CALL:
            await self._check_argument_headers(request, headers)
        request.starts_episode = request.name == START_TOOL and context.access is None
        await self._serve(request, self.service.respond, asgi[0])

    async def _check_argument_headers(self, request: HttpRequest, headers: Headers) -> None:
        """Raise McpError unless the arguments that headers repeat are the same there."""
        schema = self.service.schema_with_headers(request.context, request.name)
        if schema is None:
            return
        inbound = await _inbound()
        arguments: JsonObject = {} if request.arguments is None else json.loads(request.arguments)
        texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        _raise_rejection(inbound.validate_mcp_param_headers(schema, arguments, texts), request.id)
        for name in headers.repeated:
            if name.startswith(b"mcp-param-"):
                raise McpError(
                    -32020, f"{name.decode()} header appears more than once", request_id=request.id
                )

    # both

    async def _serve(self, request: HttpRequest, respond: Respond, scope: Scope) -> None:
        """Serve a request; the lease of the episode that it concerns does not expire meanwhile."""
        context = request.context
        scope[SCOPE_KEY] = context
        hold = None
        if context.access is not None:
            hold = self._hold(request, context.access)
        request.watched = request.watched or request.starts_episode
        try:
            await request.serve(respond)
        finally:
            if hold is not None:
                hold.release(answered=request.answered)
            if request.starts_episode and not request.answered and not context.abandoned:
                context.abandon()
            if request.session is not None:
                self.sessions.save(request.session)

    def _hold(self, request: HttpRequest, access: EpisodeAccess) -> Hold:
        # At a task's address clients send these before they know whether anybody will play.
        is_use = not (self.service.ends_with_session and request.method in (INITIALIZE, DISCOVER))
        hold = access.episode.lease.acquire(use=is_use)
        request.watched = waits = access.episode.state.phase in NOT_READY
        request.on_gone = partial(_lose_client, hold, access.episode, waits=waits)
        return hold


def _lose_client(hold: Hold, episode: Episode, *, waits: bool) -> None:
    """The client of a request is gone. `waits`: it has waited for the episode to become ready."""
    if hold.release(answered=False) and waits:
        episode.lease.lose_client(until_ready=True)


def _not_acceptable(request_id: RequestId | None) -> HttpError:
    message = "Not Acceptable: Client must accept both application/json and text/event-stream"
    return HttpError(406, INVALID_REQUEST, message, request_id=request_id)


def unsupported_version(requested: str) -> McpError:
    """The error for a revision that is not served."""
    data = {"supported": list(SESSIONLESS_VERSIONS), "requested": requested[:100]}
    return McpError(UNSUPPORTED_VERSION, "Unsupported protocol version", data)


def _agrees(message: Message, headers: Headers) -> bool:
    """Whether the headers of a request without a session plainly agree with its body."""
    version, meta = headers.text(VERSION), message.meta
    named = _NAMED.get(message.method)
    return (
        version in SESSIONLESS_VERSIONS
        and meta.get(VERSION_KEY) == version
        and CAPABILITIES_KEY in meta
        and headers.text(_METHOD) == message.method
        and not headers.repeated & {VERSION, _METHOD, _NAME}
        and (
            named is None
            or (named == "name" and message.params is not None and headers.text(_NAME) == message.params.name)
        )
        and not headers.get(_NAME, b"").startswith(b"=?")
    )


async def _check_routing(message: Message, headers: Headers) -> None:
    """Raise McpError unless the headers of a request without a session agree with its body."""
    inbound = await _inbound()
    if repeated := headers.repeated & {VERSION, _METHOD, _NAME}:
        name = min(repeated).decode()
        raise McpError(-32020, f"{name} header appears more than once", request_id=message.id)
    params = None if message.params is None else {"name": message.params.name, "_meta": message.params.meta}
    texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
    route = inbound.classify_inbound_request({"method": message.method, "params": params}, headers=texts)
    if isinstance(route, inbound.InboundLadderRejection):
        _raise_rejection(route, message.id)


def _raise_rejection(rejection: Any, request_id: RequestId) -> None:
    if rejection is not None:
        raise McpError(rejection.code, rejection.message, rejection.data, request_id=request_id)


async def _inbound() -> Any:
    """The SDK's checks of headers. Imported where a request needs them: it takes some seconds."""
    return await anyio.to_thread.run_sync(importlib.import_module, "mcp.shared.inbound")


async def _send_messages(stream: Stream, send: Send) -> None:
    """Send a stream's messages until it is over, and comments while there are none."""
    while True:
        message, is_silent = None, True
        with anyio.move_on_after(PING_SECONDS):
            message, is_silent = await stream.next(), False
        if message is None and not is_silent:
            return
        await send_body(send, PING if message is None else event_frame(message), more=True)


# responses


def event_frame(message: bytes, event_id: EventId | None = None) -> bytes:
    """An event with a JSON-RPC message, which must be on one line."""
    prefix = b"" if event_id is None else b"id: %b\r\n" % str(event_id).encode()
    return b"%bevent: message\r\ndata: %b\r\n\r\n" % (prefix, message)


def _session_header(session: Session | None) -> tuple[tuple[bytes, bytes], ...]:
    if session is None or session.id is None or not session.is_open:
        return ()
    return ((b"mcp-session-id", session.id.encode("ascii")),)


async def send_event_head(send: Send, session: Session | None) -> None:
    """Send the head of a response that is a stream of events."""
    headers = [*_EVENT_STREAM_HEADERS, *_session_header(session)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_json(
    send: Send,
    message: bytes,
    *,
    status: int = 200,
    session: Session | None = None,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """Send a whole response with a JSON body."""
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(message))]
    head += [*_session_header(session), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send_body(send, message, more=False)


async def _accept(send: Send, session: Session | None) -> None:
    """Send the response to a notification."""
    head = [(b"content-length", b"0"), *_session_header(session)]
    await send({"type": "http.response.start", "status": 202, "headers": head})
    await send_body(send, b"", more=False)


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
