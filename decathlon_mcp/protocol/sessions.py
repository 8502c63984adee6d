"""The SDK's streamable HTTP, bent in three places that it leaves no other way to.

A session is bound to the path and the token it was made with. A handshake-era POST is answered as JSON or as
a stream, whichever suits it. What a session opened is let go when the session ends. Everything here leans on
the SDK's insides; nothing else does.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias
from uuid import uuid4

from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared._stream_protocols import ReadStream, WriteStream
from mcp.shared.message import SessionMessage

from decathlon_mcp.protocol.context import RequestContext, current_request_context

log = logging.getLogger("decathlon.edge")

Streams: TypeAlias = tuple[ReadStream[SessionMessage | Exception], WriteStream[SessionMessage]]

_as_json: ContextVar[bool] = ContextVar("as_json", default=False)

_STREAMED = (
    b'"progressToken"',
    b'"initialize"',
    b'"tools/list"',
    b"claim_done",
    b"evaluate",
    b'"start_episode"',
    b'"list_tools"',
)


def wants_stream(body: bytes, accept: str) -> bool:
    """May this POST's reply be a stream? For progress, and for long silences; else JSON is faster.

    On a reply in JSON nothing can be sent before the result (a notification on it hangs the call), and a
    client that has heard nothing for its time-out gives up its whole connection.
    """
    return "text/event-stream" in accept and any(word in body for word in _STREAMED)


class _Transport(StreamableHTTPServerTransport):
    @property
    def is_json_response_enabled(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride, reportImplicitOverride]
        """Of the POST being answered; of the router, which is in no POST, no."""
        return _as_json.get()

    @is_json_response_enabled.setter
    def is_json_response_enabled(self, value: bool) -> None:
        del value

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Streams]:
        """In the session's own task, whose context is its first POST's: not one for the router to inherit."""
        _as_json.set(False)
        async with super().connect() as streams:
            yield streams


class SessionManager(StreamableHTTPSessionManager):
    """One for each kind of address. `ended` gets the visit that opened a session when that session ends."""

    def __init__(
        self,
        server: Server[Any],
        *,
        security: TransportSecuritySettings,
        idle_seconds: float,
        max_body_bytes: int,
        ended: Callable[[RequestContext], None],
    ) -> None:
        super().__init__(
            server,
            security_settings=security,
            session_idle_timeout=idle_seconds,
            max_request_body_size=max_body_bytes,
        )
        self._visits: dict[str, RequestContext] = {}
        self._ended = ended

    def opening_request_context(self, session_id: str | None) -> RequestContext | None:
        """The visit that opened this session, if it is still there."""
        return self._visits.get(session_id) if session_id else None

    def end_streams(self) -> None:
        """The streams that sessions have open without end; replies under way are not touched."""
        for transport in self._server_instances.values():
            transport.close_standalone_sse_stream()

    async def forget(self, request_context: RequestContext) -> None:
        """End the session that this visit opened: the SDK keeps one whose opening was refused."""
        for session_id in [
            session_id for session_id, opener in self._visits.items() if opener is request_context
        ]:
            await self._discard_session(session_id, self._server_instances[session_id])

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        if self.max_sessions is not None and len(self._server_instances) >= self.max_sessions:
            return None
        transport = _Transport(
            mcp_session_id=uuid4().hex,
            security_settings=self.security_settings,
            idle_timeout=self.session_idle_timeout,
        )
        session_id, request_context = transport.mcp_session_id, current_request_context.get()
        assert session_id is not None
        assert request_context is not None
        self._server_instances[session_id] = transport
        self._visits[session_id] = request_context
        return transport

    async def _discard_session(self, session_id: str, transport: StreamableHTTPServerTransport) -> None:
        if (request_context := self._visits.pop(session_id, None)) is not None:
            self._ended(request_context)
        await super()._discard_session(session_id, transport)


def answer_as_json(as_json: bool) -> None:
    """How the POST being served, in this context, is answered where it is of the handshake era."""
    _as_json.set(as_json)
