"""Everything that overrides or reads private members of the `mcp` SDK. Checked with mcp 2.3.

No other module of the server depends on the SDK's internals. `pyproject.toml` limits the server to the
checked minor version. `tests/protocol/test_sdk_members.py` compares the members used here with the installed
SDK and names those that changed; `python -m tests.protocol.sdk_members` prints the table for a new version.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias, cast
from uuid import uuid4

import anyio
from anyio.abc import TaskStatus
from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.connection import Connection
from mcp.server.context import ServerRequestContext
from mcp.server.runner import serve_connection
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

# mcp 2.3 has no public name for the protocols that annotate `Server.run` and the transports.
from mcp.shared._stream_protocols import ReadStream, WriteStream
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher, cancelled_request_id_from_params
from mcp.shared.message import SessionMessage
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    InitializeRequestParams,
    JSONRPCNotification,
    RequestId,
)
from starlette.requests import Request
from starlette.types import Send

from decathlon_mcp.background import LazyTimer, background_tasks, run_alone
from decathlon_mcp.types import JsonObject

Context: TypeAlias = ServerRequestContext[Any, Any]
MessageReadStream: TypeAlias = ReadStream[SessionMessage | Exception]
MessageWriteStream: TypeAlias = WriteStream[SessionMessage]

END_STREAM_SECONDS = 1.0
"""Time after which the first GET stream of a revived session is ended. Clients of the Python SDK give up a
stream that broke twice, unless it ended by itself in between."""

_log = logging.getLogger("decathlon.protocol")
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


async def notify_tools_changed(connection: Connection) -> None:
    """Send `tools/list_changed` on a session's standalone stream, if it is open."""
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        await connection.outbound.notify("notifications/tools/list_changed", {})


def use_json_response(enabled: bool) -> None:
    """Choose JSON or SSE for the handshake-era POST that is served in the current context."""
    _json_response.set(enabled)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitializedSession:
    """A session after its `initialize`, with which another server process can continue it.

    `client_params`: those of `initialize`. `state`: the connection's state.
    """

    id: str
    client_params: JsonObject
    protocol_version: str
    state: Mapping[str, Any]


class _LastMessage:
    """The SDK's stream of a session's messages from the client, with a reference to the last of them.

    `on_cancelled` is called with the request's id in a `notifications/cancelled`.
    """

    # The loop that dispatches a session's messages keeps the last one, with its body, until the next comes.
    # Sessions are idle for half an hour, so a few thousand requests of 4 MiB would fill the memory.
    def __init__(self, writer: Any, on_cancelled: Callable[[RequestId], object]) -> None:
        self._writer = writer
        self._last: SessionMessage | None = None
        self._on_cancelled = on_cancelled

    async def send(self, item: SessionMessage | Exception) -> None:
        self._last = item if isinstance(item, SessionMessage) else None
        message = None if self._last is None else self._last.message
        if isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
            request_id = cancelled_request_id_from_params(message.params)
            if request_id is not None:
                self._on_cancelled(request_id)
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


@dataclass(slots=True, eq=False)
class SessionRequest:
    """A request of a session that is served without the SDK.

    `key`: its id, as the SDK compares ids. `cancel` is called for `notifications/cancelled`, and at the end
    of the session, in which case `session_ended` is set.
    """

    key: RequestId
    cancel: Callable[[], object]
    session_ended: bool = False


class _IdleScope:
    """What the SDK uses of its `idle_scope`, a cancel scope: each request sets its deadline twice."""

    # anyio's scope starts and ends a timer for that.
    def __init__(self) -> None:
        self._scope = anyio.CancelScope()
        self._timer = LazyTimer(self._scope.cancel)

    def _set_deadline(self, deadline: float) -> None:
        self._timer.set(deadline)

    deadline = property(fset=_set_deadline)

    @property
    def cancel_called(self) -> bool:
        return self._scope.cancel_called

    @property
    def cancelled_caught(self) -> bool:
        return self._scope.cancelled_caught

    def __enter__(self) -> anyio.CancelScope:
        return self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._timer.stop()
        return self._scope.__exit__(kind, error, traceback)


class SessionTransport(StreamableHTTPServerTransport):
    """A session's transport that answers each POST with JSON or SSE, as chosen by `use_json_response`."""

    # In mcp 2.3 the mode is an attribute, set once per session in `__init__` and read while a POST is served.
    # JSON for all replies loses progress and log messages; SSE for all replies costs throughput, and the
    # Python client refuses events over 1 MiB. A property over a context variable makes it a choice per POST.
    @property
    def is_json_response_enabled(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride, reportImplicitOverride]
        """Whether the POST served in the current context is answered with JSON."""
        return _json_response.get()

    ends_get_stream = False
    """Whether the next GET stream is ended after `END_STREAM_SECONDS`."""
    _last_message: _LastMessage | None = None
    connection: Connection | None = None
    """The session's connection, once the client has initialized it."""

    @is_json_response_enabled.setter
    def is_json_response_enabled(self, value: bool) -> None:
        del value  # `__init__` assigns the default

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._requests: set[SessionRequest] = set()

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[tuple[MessageReadStream, MessageWriteStream]]:
        # The session's task inherits the context of the POST that opened the session. Its message router
        # reads the mode as well, and in JSON mode it would drop the notifications of every later request.
        _json_response.set(False)
        async with super().connect() as streams:
            writer = self._read_stream_writer
            assert writer is not None
            self._last_message = last_message = _LastMessage(writer, self._cancel)
            self._read_stream_writer = cast("Any", last_message)
            if self.idle_scope is not None:
                self.idle_scope = cast("anyio.CancelScope", _IdleScope())
            yield streams

    # Requests that are served without the SDK: see `exchanges`.

    @property
    def live_connection(self) -> Connection | None:
        """The connection of a session that is initialized and has not ended."""
        connection = self.connection
        if connection is None or self._terminated or not connection.initialize_accepted:
            return None
        return None if self.idle_scope is not None and self.idle_scope.cancel_called else connection

    @property
    def waiting_requests(self) -> int:
        """Number of the requests that are served without the SDK."""
        return len(self._requests)

    def begin_request(self, request_id: RequestId, cancel: Callable[[], object]) -> SessionRequest:
        """Begin to serve a request of the session, which ends with `end_request`.

        The session does not become idle meanwhile, as while `handle_request` serves one.
        """
        request = SessionRequest(coerce_request_id(request_id), cancel)
        self._requests.add(request)
        self._requests_in_flight += 1
        if self.idle_scope is not None:
            self.idle_scope.deadline = math.inf
        return request

    def end_request(self, request: SessionRequest) -> None:
        """A request has been served."""
        self._requests.discard(request)
        self._requests_in_flight -= 1
        if self.idle_scope is not None and self._idle_timeout is not None and not self._requests_in_flight:
            # The time of anyio's clock, which can only be read inside a task.
            self.idle_scope.deadline = asyncio.get_running_loop().time() + self._idle_timeout

    def leave_to_another(self, request: SessionRequest) -> None:
        """Cancel a request if there is another one with its id, which waits for the same answer."""
        if any(other.key == request.key and other is not request for other in self._requests):
            self._requests.discard(request)
            request.cancel()

    def _cancel(self, request_id: RequestId) -> None:
        key = coerce_request_id(request_id)
        for request in tuple(self._requests):
            if request.key == key:
                request.cancel()

    async def terminate(self) -> None:
        for request in tuple(self._requests):
            request.session_ended = True
            request.cancel()
        await super().terminate()

    async def _handle_get_request(self, request: Request, send: Send) -> None:
        if not self.ends_get_stream:
            await super()._handle_get_request(request, send)
            return
        self.ends_get_stream = False
        async with background_tasks() as tasks:
            tasks.start_soon(self._end_get_stream)
            await super()._handle_get_request(request, send)

    async def _end_get_stream(self) -> None:
        await anyio.sleep(END_STREAM_SECONDS)
        self.close_standalone_sse_stream()

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

    @property
    def is_full(self) -> bool:
        """Whether as many sessions are open as may be."""
        return self.max_sessions is not None and len(self._server_instances) >= self.max_sessions

    def is_open(self, session_id: str) -> bool:
        """Whether the session is open in this process."""
        return session_id in self._server_instances

    def transport(self, session_id: str) -> SessionTransport | None:
        """The transport of an open session."""
        return cast("SessionTransport | None", self._server_instances.get(session_id))

    async def revive_session(self, session: InitializedSession) -> SessionTransport | None:
        """Open a session that another process has initialized, in the context of the request that needs it.

        None if as many sessions are open as may be. The caller makes sure that nobody else revives the same
        session meanwhile.
        """
        transport = self._new_transport(session.id)
        if transport is None:
            return None
        transport.ends_get_stream = True
        assert self._task_group is not None
        try:
            await self._task_group.start(self._run_revived, transport, session)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._discard_session(session.id, transport)
            raise
        return transport

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> None:
        """Run a function in the background, until the manager ends; afterwards, do not run it."""
        if self._task_group is not None:
            self._task_group.start_soon(run_alone, function, *arguments)

    # What the SDK's `_serve_opening_request` does with a session, but for a connection after its handshake.
    async def _run_revived(
        self,
        transport: SessionTransport,
        session: InitializedSession,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        async with transport.connect() as (read_stream, write_stream):
            dispatcher: JSONRPCDispatcher[TransportContext] = JSONRPCDispatcher(
                read_stream, write_stream, inline_methods=frozenset({"initialize"})
            )
            connection = Connection(
                dispatcher,
                protocol_version=session.protocol_version,
                session_id=session.id,
                client_params=InitializeRequestParams.model_validate(session.client_params, by_name=False),
            )
            connection.initialized.set()
            connection.state.update(session.state)
            transport.connection = connection
            task_status.started()
            try:
                with transport.idle_scope or anyio.CancelScope():
                    await serve_connection(
                        self.app, dispatcher, connection=connection, lifespan_state=self._lifespan_state
                    )
            except Exception:  # noqa: BLE001  (as the SDK does: a session that fails ends alone)
                _log.exception("a revived session failed")
            finally:
                await self._discard_session(session.id, transport)

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
        return self._new_transport(uuid4().hex)

    def _new_transport(self, session_id: str) -> SessionTransport | None:
        if self.is_full or not self.may_open_session():
            return None
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
