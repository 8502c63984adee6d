"""Everything that overrides or reads private members of the `mcp` SDK. Checked with mcp 2.3.

No other module of the server depends on the SDK's internals. `pyproject.toml` limits the server to the
checked minor version. `tests/protocol/test_sdk_members.py` compares the members used here with the installed
SDK and names those that changed; `python -m tests.protocol.sdk_members` prints the table for a new version.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, cast
from uuid import uuid4

from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.connection import Connection
from mcp.server.context import ServerRequestContext
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

# mcp 2.3 has no public name for the protocols that annotate `Server.run` and the transports.
from mcp.shared._stream_protocols import ReadStream, WriteStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCNotification

Context: TypeAlias = ServerRequestContext[Any, Any]
MessageReadStream: TypeAlias = ReadStream[SessionMessage | Exception]
MessageWriteStream: TypeAlias = WriteStream[SessionMessage]

_json_response: ContextVar[bool] = ContextVar("json_response", default=False)


def connection_of(ctx: Context) -> Connection:
    """The connection of a request: its `state`, session id and standalone stream."""
    # mcp 2.3 gives handlers no public access to the connection, the only place for per-session state.
    return ctx.session._connection  # pyright: ignore[reportPrivateUsage]


async def send_notification(ctx: Context, method: str, params: dict[str, Any], *, with_reply: bool) -> None:
    """Send a notification unchanged, on the reply's stream or on the connection's standalone stream."""
    # The public methods send the SDK's models, which drop fields that the models do not know.
    session = ctx.session
    channel = session._request_outbound if with_reply else session._connection.outbound  # pyright: ignore[reportPrivateUsage]
    await channel.notify(method, params)


def use_json_response(enabled: bool) -> None:
    """Choose JSON or SSE for the handshake-era POST that is served in the current context."""
    _json_response.set(enabled)


class _LastMessage:
    """The SDK's stream of a session's messages from the client, with a reference to the last of them."""

    # The loop that dispatches a session's messages keeps the last one, with its body, until the next comes.
    # Sessions are idle for half an hour, so a few thousand requests of 4 MiB would fill the memory.
    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._last: SessionMessage | None = None

    async def send(self, item: SessionMessage | Exception) -> None:
        self._last = item if isinstance(item, SessionMessage) else None
        await self._writer.send(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def forget(self, key: str, value: object) -> None:
        """Empty the last message if the scope of its request has this entry."""
        last = self._last
        request = getattr(None if last is None else last.metadata, "request_context", None)
        if last is not None and request is not None and request.scope.get(key) is value:
            last.message = JSONRPCNotification(jsonrpc="2.0", method="notifications/forgotten")
            last.metadata = self._last = None


class SessionTransport(StreamableHTTPServerTransport):
    """A session's transport that answers each POST with JSON or SSE, as chosen by `use_json_response`."""

    # In mcp 2.3 the mode is an attribute, set once per session in `__init__` and read while a POST is served.
    # JSON for all replies loses progress and log messages; SSE for all replies costs throughput, and the
    # Python client refuses events over 1 MiB. A property over a context variable makes it a choice per POST.
    @property
    def is_json_response_enabled(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride, reportImplicitOverride]
        """Whether the POST served in the current context is answered with JSON."""
        return _json_response.get()

    _last_message: _LastMessage | None = None

    @is_json_response_enabled.setter
    def is_json_response_enabled(self, value: bool) -> None:
        del value  # `__init__` assigns the default

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[tuple[MessageReadStream, MessageWriteStream]]:
        # The session's task inherits the context of the POST that opened the session. Its message router
        # reads the mode as well, and in JSON mode it would drop the notifications of every later request.
        _json_response.set(False)
        async with super().connect() as streams:
            writer = self._read_stream_writer
            assert writer is not None
            self._last_message = last_message = _LastMessage(writer)
            self._read_stream_writer = cast("Any", last_message)
            yield streams

    def forget_message(self, key: str, value: object) -> None:
        """Drop the message of a served request, which has this entry in its scope."""
        if self._last_message is not None:
            self._last_message.forget(key, value)


class SessionManagerBase(StreamableHTTPSessionManager):
    """The SDK's session manager with `SessionTransport` and with hooks for sessions that open and close."""

    def may_open_session(self) -> bool:
        """Called in the context of a POST that would open a session; if false, it is answered with 503."""
        return True

    def session_opened(self, session_id: str) -> None:
        """Called in the context of the POST that opens the session, before the POST is served."""

    def session_closed(self, session_id: str) -> None:
        """Called when a session ends for any reason; possibly more than once."""

    async def discard(self, session_id: str) -> None:
        """End a session; its id is unknown from now on."""
        await self._discard_session(session_id, self._server_instances[session_id])

    def forget_message(self, session_id: str, key: str, value: object) -> None:
        """Drop a session's last message if the scope of its request, which was served, has this entry."""
        transport = self._server_instances.get(session_id)
        if isinstance(transport, SessionTransport):
            transport.forget_message(key, value)

    def close_standalone_streams(self) -> None:
        """Close the GET stream of every session. Replies in progress are not affected."""
        for transport in self._server_instances.values():
            transport.close_standalone_sse_stream()

    # A copy of the SDK's method, which has no factory for the transport. Left out are the event store and the
    # owner, which we do not use, and the log line, because it contains the session id.
    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        if self.max_sessions is not None and len(self._server_instances) >= self.max_sessions:
            return None
        if not self.may_open_session():
            return None
        session_id = uuid4().hex
        transport = SessionTransport(
            mcp_session_id=session_id,
            security_settings=self.security_settings,
            idle_timeout=self.session_idle_timeout,
        )
        self._server_instances[session_id] = transport
        self.session_opened(session_id)
        return transport

    # Every way in which a session ends (DELETE, idle time-out, crash, failed `initialize`) comes through
    # here.
    async def _discard_session(self, session_id: str, transport: StreamableHTTPServerTransport) -> None:
        self.session_closed(session_id)
        await super()._discard_session(session_id, transport)
