"""Sessions over streamable HTTP: each belongs to the path and the token that it was opened with.

With a store, sessions and their requests in progress survive their server: a session that is not open here
but in the store is revived by the first request that names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import anyio
from mcp.server.context import CallNext, HandlerResult
from mcp.server.lowlevel import Server
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import Message

from decathlon_mcp.episodes.admission import share_of
from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.protocol.context import (
    SCOPE_KEY,
    RequestContext,
    current_request_context,
    request_context_of,
)
from decathlon_mcp.protocol.resumption import (
    RESUMABLE_SINCE,
    EventId,
    RequestStream,
    Resumption,
    SessionStreams,
    conflicting_stream,
    request_id_text,
)
from decathlon_mcp.protocol.revival import SavedSession, SavedSessions, stored_client_params
from decathlon_mcp.protocol.sdk import (
    Context,
    InitializedSession,
    ResumableRequest,
    SessionManagerBase,
    SessionTransport,
    connection_of,
    parse_request,
)
from decathlon_mcp.storage.request_log import RequestRow
from decathlon_mcp.types import as_object

MAX_AGENT_SESSIONS = 1_000
"""Open sessions at the address of one episode's agent, which needs no token. Some clients open a session for
every call and never end it; a session without requests ends after the idle time."""
_RESUMABLE_METHODS = frozenset({"tools/call", "tools/list"})
SESSION_RETRY_SECONDS = 30.0
EXPIRE_SECONDS = 1.0
"""Time between two searches for answers that need not be kept any more."""


class SessionManager(SessionManagerBase):
    """The sessions of one server, with the request context that opened each of them.

    `max_sessions` bounds their number; on a server with several tokens, each may have the part
    `share_per_token` of it. `on_close` is called with that context when its session ends. `saved`: the
    sessions in the store; None if they are to end with this process.
    """

    def __init__(
        self,
        server: Server[Any],
        *,
        idle_seconds: float,
        max_body_bytes: int,
        max_sessions: int,
        share_per_token: float,
        on_close: Callable[[RequestContext], None],
        saved: SavedSessions | None = None,
    ) -> None:
        super().__init__(
            server,
            # `http` has checked the request.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            session_idle_timeout=idle_seconds,
            max_request_body_size=max_body_bytes,
            max_sessions=max_sessions,
        )
        self._max_per_token = share_of(max_sessions, share_per_token)
        self._sessions_by_owner: Counter[tuple[str, str]] = Counter()
        self._openers: dict[str, RequestContext] = {}
        self._on_close = on_close
        self._saved = saved
        self._open: dict[str, SavedSession] = {}
        self._resumption = None if saved is None else Resumption(saved.store)
        self._reviving: dict[str, anyio.Lock] = {}
        # First, so that it sees the final result of `initialize`.
        server.middleware.insert(0, self._keep_session)

    @property
    def saved(self) -> dict[str, SavedSession]:
        """The open sessions that are in the store."""
        return self._open

    async def expire_answers(self) -> None:
        """Forget answers that were fetched, or never will be, until cancelled. For a manager with a store."""
        assert self._resumption is not None
        while True:
            await anyio.sleep(EXPIRE_SECONDS)
            self._resumption.expire()

    def is_live(self, session_id: str) -> bool:
        """Whether `revive` would do nothing for a session that exists."""
        return self.is_open(session_id) and session_id not in self._reviving

    def opener(self, session_id: str | None) -> RequestContext | None:
        """The request context that opened a session; None if there is no such session."""
        return self._openers.get(session_id) if session_id else None

    def belongs_to_other(self, session_id: str | None, request_context: RequestContext) -> bool:
        """Whether the session was opened at another path or with another token."""
        # The SDK does not bind sessions to paths: with a session of the lobby, one could use a task's
        # address.
        opener = self.opener(session_id)
        if opener is None:
            return False
        return (opener.path, opener.principal.token) != (
            request_context.path,
            request_context.principal.token,
        )

    async def revive(self, session_id: str | None, request_context: RequestContext, request: Request) -> None:
        """Open the request's session again if an earlier server has opened it, at this path with this token.

        Raises AtCapacityError if as many sessions are open as may be.
        """
        if session_id is None or self._saved is None:
            return
        # Without a lock, the second of two requests that arrive together meets a transport that is not
        # connected yet.
        if self.is_live(session_id):
            return
        lock = self._reviving.setdefault(session_id, anyio.Lock())
        try:
            async with lock:
                if not self.is_open(session_id):
                    await self._revive(self._saved, session_id, request_context, request)
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._reviving.pop(session_id, None)

    async def _revive(
        self, saved: SavedSessions, session_id: str, request_context: RequestContext, request: Request
    ) -> None:
        session = saved.load(session_id)
        if session is None or not session.opened_by(request_context):
            return
        access = saved.access(session, request_context)
        opener = replace(request_context, access=access, started=[])
        token = current_request_context.set(opener)
        self._open[session_id] = session
        try:
            transport = await self.revive_session(
                InitializedSession(
                    id=session.id,
                    client_params=session.client_params,
                    protocol_version=session.protocol_version,
                    state=saved.connection_state(session, access),
                )
            )
        finally:
            current_request_context.reset(token)
            if not self.is_open(session_id):
                del self._open[session_id]
        if transport is None:
            raise AtCapacityError("too many open sessions", retryAfterSeconds=SESSION_RETRY_SECONDS)
        saved.save(session)
        for row in saved.store.requests(session_id):
            # Of the others, only those whose answers did not arrive: then their clients name them.
            if not row.answered:
                self._dispatch_again(transport, row, request)

    def _dispatch_again(
        self, transport: SessionTransport, row: RequestRow, request: Request
    ) -> RequestStream | None:
        """Dispatch a stored request as though its client had sent it again. `request`: any of the session."""
        message, opener = parse_request(row.message), self._openers.get(row.session)
        if message is None or opener is None or transport.streams is None:
            return None
        stream = transport.streams.open(message.id, row.message, stored=True)
        if stream is not None:
            context = replace(opener, started=[], can_stream=True, stream=stream)
            scope = {**request.scope, "method": "POST", SCOPE_KEY: context}
            resumable = ResumableRequest(message, stream)
            self.start_soon(_serve_without_client, transport, resumable, Request(scope, _no_client))
        return stream

    def resumable_streams(self, session_id: str) -> SessionStreams | None:
        """The streams of a session whose client can come back for an answer; None for other sessions."""
        session, transport = self._open.get(session_id), self.transport(session_id)
        if session is None or transport is None or session.protocol_version < RESUMABLE_SINCE:
            return None
        return transport.streams

    def open_stream(self, request: Request, body: bytes, method: str) -> ResumableRequest | None:
        """Prepare the answer to a POST of which the client may lose the connection.

        None if the POST is to be answered as without a store. `method`: that of the message in the body.
        """
        headers = request.headers
        streams = self.resumable_streams(headers.get("mcp-session-id", ""))
        accept = headers.get("accept", "")
        if (
            streams is None
            or method not in _RESUMABLE_METHODS
            or "text/event-stream" not in accept
            or "application/json" not in accept
            or not headers.get("content-type", "").startswith("application/json")
            or headers.get("mcp-protocol-version", RESUMABLE_SINCE) not in HANDSHAKE_PROTOCOL_VERSIONS
        ):
            return None
        message = parse_request(body)
        if message is None or message.method != method:
            return None
        if (running := streams.in_progress(message.id)) is not None:
            rows = {row.request: row.message for row in session_requests(self._saved, running.session)}
            if running.request != request_id_text(message.id) or rows.get(running.request) != body:
                running = conflicting_stream(running.session, message.id)
            return ResumableRequest(message, running, joins=True)
        stream = streams.open(message.id, body)
        return None if stream is None else ResumableRequest(message, stream)

    async def _find_stream(
        self, transport: SessionTransport, event_id: EventId, request: Request
    ) -> RequestStream | None:
        """The stream of the request that an event id names, for a client that comes back."""
        if transport.streams is None or transport.mcp_session_id is None:
            return None
        if (stream := transport.streams.find(event_id.request)) is not None:
            return stream
        # Its answer was written by an earlier server, or dropped from memory, where answers have a limit.
        for row in session_requests(self._saved, transport.mcp_session_id):
            if row.request == event_id.request:
                return self._dispatch_again(transport, row, request)
        return None

    async def _keep_session(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Middleware: keep a session's connection, and its row in the store. Before the answer is sent."""
        connection = connection_of(ctx)
        session_id = connection.session_id
        transport = None if session_id is None else self.transport(session_id)
        if session_id is None or transport is None:
            return await call_next(ctx)
        if ctx.method == "initialize" and ctx.request_id is not None:
            result = await call_next(ctx)
            transport.connection = connection
            if self._saved is not None:
                self._save_opened(self._saved, session_id, ctx, as_object(result) or {})
            return result
        if self._saved is None:
            return await call_next(ctx)
        try:
            return await call_next(ctx)
        finally:
            if (session := self._open.get(session_id)) is not None:
                changed = session.with_state(connection.state)
                if changed is not session:
                    self._open[session_id] = changed
                    self._saved.save(changed)

    def _save_opened(
        self, saved: SavedSessions, session_id: str, ctx: Context, result: dict[str, Any]
    ) -> None:
        request_context = request_context_of(ctx)
        session = SavedSession(
            id=session_id,
            path=request_context.path,
            token=request_context.principal.token,
            client_params=stored_client_params(dict(ctx.params or {})),
            protocol_version=str(result.get("protocolVersion")),
            episode=None if request_context.access is None else request_context.access.episode.id,
        )
        self._open[session_id] = session
        saved.save(session)

    async def discard_opened_by(self, request_context: RequestContext) -> None:
        """End the session that this request opened, if it is still there."""
        # A failed `initialize` is answered with status 200, so the SDK keeps its session until it is idle.
        for session_id in [key for key, opener in self._openers.items() if opener is request_context]:
            # References in cycles keep an ended session's objects until they are collected, which is rare.
            self.forget_message(session_id, SCOPE_KEY, request_context)
            await self.discard(session_id)

    def may_open_session(self) -> bool:
        request_context = current_request_context.get()
        assert request_context is not None
        return self._has_room_for(request_context)

    def refuse_if_full(self, request_context: RequestContext) -> None:
        """Raise AtCapacityError if the request cannot open another session."""
        if self.is_full or not self._has_room_for(request_context):
            raise AtCapacityError("too many open sessions", retryAfterSeconds=SESSION_RETRY_SECONDS)

    def _has_room_for(self, request_context: RequestContext) -> bool:
        """Whether the owner of the request has fewer sessions than its share."""
        key = _owner_key(request_context)
        if key is None:
            return True
        limit = self._max_per_token if key[0] == "token" else min(MAX_AGENT_SESSIONS, self._max_per_token)
        return self._sessions_by_owner[key] < limit

    def session_opened(self, session_id: str) -> None:
        request_context = current_request_context.get()
        assert request_context is not None
        self._openers[session_id] = request_context
        if (key := _owner_key(request_context)) is not None:
            self._sessions_by_owner[key] += 1

    def prepare_transport(self, transport: SessionTransport, session_id: str) -> None:
        if self._resumption is not None:
            request_context = current_request_context.get()
            assert request_context is not None
            transport.streams = self._resumption.add_session(session_id, _owner_key(request_context))
            transport.find_stream = partial(self._find_stream, transport)

    def session_closed(self, session_id: str) -> None:
        session = self._open.pop(session_id, None)
        if self._resumption is not None:
            self._resumption.end_session(session_id)
        if self._saved is not None:
            if self._saved.handing_over:
                return
            if session is not None:
                self._saved.delete(session_id)
        if (request_context := self._openers.pop(session_id, None)) is not None:
            if (key := _owner_key(request_context)) is not None:
                self._sessions_by_owner[key] -= 1
                if not self._sessions_by_owner[key]:
                    del self._sessions_by_owner[key]
            self._on_close(request_context)


def session_requests(saved: SavedSessions | None, session_id: str) -> list[RequestRow]:
    """The stored requests of a session."""
    return [] if saved is None else saved.store.requests(session_id)


async def _no_client() -> Message:
    return {"type": "http.disconnect"}


async def _serve_without_client(
    transport: SessionTransport, resumable: ResumableRequest, request: Request
) -> None:
    """Dispatch a request whose client may come back for the answer."""
    stream, request_context = resumable.stream, request.scope[SCOPE_KEY]
    with ExitStack() as stack:
        if request_context.access is not None:
            stack.enter_context(request_context.access.episode.hold(use=False))
        await transport.dispatch(resumable, request)
        await stream.wait(lambda: stream.complete)
    transport.forget_message(SCOPE_KEY, request_context)


def _owner_key(request_context: RequestContext) -> tuple[str, str] | None:
    """Whose sessions are counted together: a token's, or those at an agent's address; None for all others."""
    if request_context.by_agent_id:
        return "agent", request_context.path
    token = request_context.principal.share_key
    return None if token is None else ("token", token)
