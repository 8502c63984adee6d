"""MCP over streamable HTTP: what is served at an address, from a checked body to a request's response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
from msgspec import Raw
from starlette.types import Send

from decathlon_mcp.background import LazyTimer, background_tasks, run_alone
from decathlon_mcp.episodes.operations import check_operation
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.protocol.headers import SESSION, VERSION, Headers, check_argument_headers, check_routing
from decathlon_mcp.protocol.messages import (
    CALL,
    CANCELLED,
    DISCOVER,
    INITIALIZE,
    INVALID_REQUEST,
    LIST,
    OPERATION_KEY,
    SESSIONLESS_VERSIONS,
    EventId,
    Kind,
    McpError,
    Message,
    Params,
    unsupported_version,
)
from decathlon_mcp.protocol.requests import START_TOOL, Request, RequestContext, Respond, Result, Service
from decathlon_mcp.protocol.responses import (
    PING,
    PING_SECONDS,
    HttpRequest,
    event_frame,
    send_body,
    send_event_head,
    send_whole,
    wait_until_disconnected,
)
from decathlon_mcp.protocol.sessions import AddressKind, Session, Sessions, Stream
from decathlon_mcp.protocol.stdio import LineServer, batch_fault

EPISODE_KEY = "decathlon/episode"
"""Key in the `_meta` of a `notifications/cancelled` at the lobby with the episode of the operation."""
END_STREAM_SECONDS = 1.0
"""Time after which the first GET stream of a revived session is ended. Clients of the Python SDK give up a
stream that broke twice, unless it ended by itself in between."""


class McpAddress:
    """Serves MCP for the addresses of one kind. `start_soon` starts a task in the background.

    `post`, `post_batch`, `get` and `delete` send a response, or raise McpError or DecathlonError for a
    request that is refused before.
    """

    def __init__(
        self,
        service: Service,
        kind: AddressKind,
        registry: EpisodeRegistry,
        start_soon: Callable[..., object],
    ) -> None:
        self.sessions = Sessions(registry, kind)
        self._service = service
        self._registry = registry
        self._start_soon = start_soon

    async def post(self, message: Message, context: RequestContext) -> None:
        """Serve a message."""
        headers, send = context.headers, _send_of(context)
        is_sessionless, (takes_json, takes_events) = headers.is_sessionless, headers.accepts
        if not takes_json or (is_sessionless and not takes_events):
            raise _not_acceptable("both application/json and text/event-stream")
        opens, session = message.method == INITIALIZE and not is_sessionless, None
        if is_sessionless:
            await _check_sessionless(message, headers)
        elif not opens or SESSION in headers or not message.is_request:
            session = self._session_of(context)
        if not message.is_request:
            self._on_notification(message, context, session)
            await send_whole(send, status=202, session=session)
        elif opens:
            await self._initialize(message, context, session)
        else:
            version = headers.text(VERSION) or "" if session is None else session.version
            request = self._request(message, context, session, version)
            schema = None
            if session is None and request.method == CALL:
                schema = self._service.schema_with_headers(context, request.name)
            if schema is not None:
                await check_argument_headers(schema, request.arguments, headers, request.id)
            request.starts_episode = request.name == START_TOOL and context.access is None
            # At a task's address clients send `server/discover` before they know whether anybody will play.
            is_use = not (self._service.ends_with_session and request.method == DISCOVER)
            await self._serve(request, self._service.respond, is_use=is_use)

    async def post_batch(self, items: list[Raw], context: RequestContext) -> None:
        """Serve a batch: one body with all answers."""
        session = None if context.headers.is_sessionless else self._session_of(context)
        fault = batch_fault(items, session)
        if session is None or fault:
            raise McpError(INVALID_REQUEST, fault, status=400)

        async def write(line: bytes) -> None:
            session.send(line)

        lines = LineServer(self._service, write, lambda: context, session)
        hold = None if context.access is None else context.access.episode.lease.acquire()
        try:
            answer = await (await lines.begin_batch(items))()
        finally:
            if hold is not None:
                hold.release()
        self.sessions.save(session)
        await send_whole(_send_of(context), answer, status=200 if answer else 202, session=session)

    async def get(self, context: RequestContext) -> None:
        """Serve a session's stream, or a client that comes back for an answer."""
        session, send = self._session_of(context), _send_of(context)
        if not context.headers.accepts[1]:
            raise _not_acceptable("text/event-stream")
        last = context.headers.text(b"last-event-id")
        if not last:
            await self._serve_stream(context, session)
            return
        event_id = EventId.parse(last)
        if event_id is None or not session.generation:
            raise McpError(
                INVALID_REQUEST, "Last-Event-ID: this is no id of an event of this server", status=400
            )
        if event_id.is_answer:
            # That was all.
            await send_event_head(send, session)
            await send_body(send, b"", more=False)
            return
        method = LIST if event_id.kind is Kind.LIST else CALL
        message = Message(id=event_id.request, method=method, params=Params(name=""))
        request = self._request(message, context, session, session.version, resumed=event_id)
        request.starts_episode = event_id.kind is Kind.START
        await self._serve(request, self._service.respond_again(event_id.kind, event_id.agent))

    async def delete(self, context: RequestContext) -> None:
        """End a session."""
        session = self._session_of(context)
        self.sessions.end(session)
        await send_whole(_send_of(context), session=session)

    def _request(
        self,
        message: Message,
        context: RequestContext,
        session: Session | None,
        version: str,
        *,
        resumed: EventId | None = None,
    ) -> HttpRequest:
        start_soon = self._start_soon
        return HttpRequest(message, context, session, version, start_soon=start_soon, resumed=resumed)

    async def _serve(self, request: HttpRequest, respond: Respond, *, is_use: bool = True) -> None:
        try:
            await request.serve(respond, is_use=is_use)
        finally:
            if request.session is not None:
                self.sessions.save(request.session)

    def _session_of(self, context: RequestContext) -> Session:
        """The session that a request names. Raises McpError."""
        session_id = context.headers.text(SESSION)
        if session_id is None:
            raise McpError(INVALID_REQUEST, "Bad Request: Missing session ID", status=400)
        session = self.sessions.find(session_id, context)
        if session is None:
            # The same for a session of another path or token: a client must not be able to tell. On 404 it
            # initializes a new session, as the protocol requires; 403 would make it give up.
            raise McpError(INVALID_REQUEST, "Session not found", status=404)
        if context.access is None and self._service.ends_with_session:
            context.access = session.access
        return session

    async def _initialize(self, message: Message, context: RequestContext, session: Session | None) -> None:
        """Serve `initialize`. `session`: the session of a client that sends `initialize` again."""
        version, ends_with_session = message.handshake_version, self._service.ends_with_session
        if session is not None:
            request = self._request(message, context, session, version)
            await self._serve(request, self._service.respond, is_use=not ends_with_session)
            return
        opened = self.sessions.create(version, context)

        async def respond(request: Request) -> Result:
            result = await self._service.respond(request)
            opened.access = context.access if ends_with_session else None
            self.sessions.add(opened)
            return result

        request = self._request(message, context, opened, version)
        request.starts_episode = ends_with_session
        await self._serve(request, respond)
        if context.abandoned:
            self.sessions.end(opened)

    def _on_notification(self, message: Message, context: RequestContext, session: Session | None) -> None:
        """Serve a notification. Raises BadRequestError, UnknownEpisodeError."""
        if context.access is not None:
            # At a task's address clients send some before they know whether anybody will play.
            context.access.episode.lease.acquire(use=not self._service.ends_with_session).release()
        if message.method != CANCELLED:
            return
        if OPERATION_KEY in message.meta:
            # At the lobby the notification names the operation's episode.
            operation, access = check_operation(message.meta[OPERATION_KEY]), context.access
            if access is None:
                access = self._registry.access(str(message.meta.get(EPISODE_KEY)), context.principal)
            access.episode.calls.cancel(operation)
        if session is not None and message.params is not None:
            session.cancel(message.params.request_id)

    async def _serve_stream(self, context: RequestContext, session: Session) -> None:
        """Serve a session's own stream until its client leaves, or it is ended."""
        assert context.asgi is not None
        _, receive, send = context.asgi
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
        if stream.is_lost and access is not None and self._service.ends_with_session and not session.streams:
            # A client that dies loses all its connections.
            access.episode.lease.lose_client()


def _send_of(context: RequestContext) -> Send:
    assert context.asgi is not None
    return context.asgi[2]


def _not_acceptable(media_types: str) -> McpError:
    return McpError(INVALID_REQUEST, f"Not Acceptable: Client must accept {media_types}", status=406)


async def _check_sessionless(message: Message, headers: Headers) -> None:
    """Raise McpError for a message without a session that is not served."""
    if message.is_request:
        await check_routing(message, headers)
    elif message.is_response:
        fault = "the body must be one JSON-RPC request or notification"
        raise McpError(INVALID_REQUEST, fault, status=400)
    elif (version := headers.text(VERSION) or "") not in SESSIONLESS_VERSIONS:
        raise unsupported_version(version)


async def _send_messages(stream: Stream, send: Send) -> None:
    """Send a stream's messages until it is over, and comments while there are none."""
    while True:
        message, is_silent = None, True
        with anyio.move_on_after(PING_SECONDS):
            message, is_silent = await stream.next(), False
        if message is None and not is_silent:
            return
        await send_body(send, PING if message is None else event_frame(message), more=True)
