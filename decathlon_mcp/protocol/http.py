"""MCP over streamable HTTP: what is served at an address, from a checked body to a request's response."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from functools import partial

import anyio
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from decathlon_mcp.background import LazyTimer, background_tasks, run_alone
from decathlon_mcp.episodes.access import EpisodeAccess
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.lease import Hold
from decathlon_mcp.episodes.operations import check_operation
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import NOT_READY
from decathlon_mcp.protocol.headers import (
    SESSION,
    VERSION,
    Headers,
    check_argument_headers,
    check_routing,
)
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
    RequestId,
    unsupported_version,
)
from decathlon_mcp.protocol.requests import (
    SCOPE_KEY,
    START_TOOL,
    Request,
    RequestContext,
    Respond,
    Result,
    Service,
)
from decathlon_mcp.protocol.responses import (
    PING,
    PING_SECONDS,
    HttpRequest,
    Watch,
    event_frame,
    send_accepted,
    send_body,
    send_event_head,
    send_json,
    wait_until_disconnected,
)
from decathlon_mcp.protocol.sessions import Session, Sessions, Stream
from decathlon_mcp.protocol.stdio import LineServer, batch_fault
from decathlon_mcp.types import JsonObject

EPISODE_KEY = "decathlon/episode"
"""Key in the `_meta` of a `notifications/cancelled` at the lobby with the episode of the operation."""
END_STREAM_SECONDS = 1.0
"""Time after which the first GET stream of a revived session is ended. Clients of the Python SDK give up a
stream that broke twice, unless it ended by itself in between."""


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
        is_sessionless, (takes_json, takes_events) = headers.is_sessionless, headers.accepts
        if not takes_json or (is_sessionless and not takes_events):
            raise _not_acceptable(request_id)
        opens, session = message.method == INITIALIZE, None
        if is_sessionless:
            await _check_sessionless(message, headers)
        else:
            session = self._session_of(headers, context, request_id, opens=opens)
        if not message.is_request:
            self._on_notification(message, context, session)
            await send_accepted(asgi[2], session)
            return
        if opens and not is_sessionless:
            await self._initialize(message, context, session, asgi, takes_events=takes_events)
            return
        request = HttpRequest(
            message,
            context,
            session,
            headers.text(VERSION) or "" if session is None else session.version,
            watch=self._watch,
            asgi=asgi,
            takes_events=takes_events,
            generation=self.sessions.generation,
        )
        is_call = message.method == CALL
        if (
            is_call
            and session is None
            and (schema := self.service.schema_with_headers(context, request.name))
        ):
            await check_argument_headers(schema, request.arguments, headers, request.id)
        request.starts_episode = request.name == START_TOOL and context.access is None
        await self._serve(request, self.service.respond, asgi[0])

    async def post_batch(
        self,
        items: list[Raw],
        context: RequestContext,
        headers: Headers,
        asgi: tuple[Scope, Receive, Send],
    ) -> None:
        """Serve a batch: one body with all answers. Raises McpError where there are none."""
        session = None if headers.is_sessionless else self._session_of(headers, context, None)
        if fault := batch_fault(items, session):
            raise McpError(INVALID_REQUEST, fault, status=400)
        assert session is not None

        async def write(line: bytes) -> None:
            session.send_text(line)

        lines = LineServer(self.service, write, lambda: context, session)
        with nullcontext() if context.access is None else context.access.episode.lease.hold():
            answer = await (await lines.begin_batch(items))()
        self.sessions.save(session)
        if answer:
            await send_json(asgi[2], answer, session=session)
        else:
            await send_accepted(asgi[2], session)

    async def get(self, context: RequestContext, headers: Headers, asgi: tuple[Scope, Receive, Send]) -> None:
        """Serve a session's stream, or a client that comes back for an answer. Raises McpError."""
        session = self._session_of(headers, context, None)
        assert session is not None
        if not headers.accepts[1]:
            raise McpError(
                INVALID_REQUEST, "Not Acceptable: Client must accept text/event-stream", status=406
            )
        last = headers.text(b"last-event-id")
        if not last:
            await self._serve_stream(context, session, asgi)
            return
        event_id = EventId.parse(last)
        if event_id is None or not session.can_return:
            raise McpError(
                INVALID_REQUEST, "Last-Event-ID: this is no id of an event of this server", status=400
            )
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
        """End a session. Raises McpError."""
        session = self._session_of(headers, context, None)
        assert session is not None
        self.sessions.end(session)
        await send_json(asgi[2], b"", session=session)

    def _session_of(
        self, headers: Headers, context: RequestContext, request_id: RequestId | None, *, opens: bool = False
    ) -> Session | None:
        """The session that a request names. Raises McpError; None for one that `opens` a session."""
        session_id = headers.text(SESSION)
        if session_id is None:
            if opens and request_id is not None:
                return None
            raise McpError(
                INVALID_REQUEST, "Bad Request: Missing session ID", request_id=request_id, status=400
            )
        session = self.sessions.find(session_id, context)
        if session is None:
            # The same for a session of another path or token: a client must not be able to tell. On 404 it
            # initializes a new session, as the protocol requires; 403 would make it give up.
            raise McpError(INVALID_REQUEST, "Session not found", request_id=request_id, status=404)
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
        version = message.handshake_version
        make = partial(HttpRequest, watch=self._watch, asgi=asgi, takes_events=takes_events)
        if session is not None:
            await self._serve(make(message, context, session, version), self.service.respond, asgi[0])
            return
        share = self.sessions.refuse_if_full(context)
        opened = self.sessions.create(version, context)

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

    # all requests

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


def _not_acceptable(request_id: RequestId | None) -> McpError:
    message = "Not Acceptable: Client must accept both application/json and text/event-stream"
    return McpError(INVALID_REQUEST, message, request_id=request_id, status=406)


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
