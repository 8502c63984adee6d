"""Tool calls that are served without the SDK: from the decoded request to the last byte of the response.

The call's reply is relayed as the bytes that the driver sent. Of the SDK, what a call in a session depends on
remains: the session's idle time, `notifications/cancelled`, and the end of the session
(`sdk.SessionTransport.serving`); the log level, and the stream for what is not part of a reply.

Three forms of response, as the SDK and `resumption` would give:

- `JsonCall`: one JSON body. The client's connection is not watched: the call goes on without it.
- `StreamedCall`: events that the client can fetch again on another connection.
- `SessionlessCall`: one JSON body, or events once the call takes long. A disconnect cancels the call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import ClassVar, TypeAlias

import anyio
from mcp.server.connection import Connection
from mcp.server.streamable_http import REQUEST_CANCELLED
from mcp.shared.inbound import ERROR_CODE_HTTP_STATUS
from mcp_types import ErrorData, JSONRPCNotification
from starlette.types import Receive, Send

from decathlon_mcp.driver_client.replies import CallParams
from decathlon_mcp.episodes.episode import EpisodeAccess
from decathlon_mcp.episodes.operations import Caller
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.protocol.context import RequestContext, is_disconnected, wait_until_disconnected
from decathlon_mcp.protocol.envelopes import ToolCall
from decathlon_mcp.protocol.relay import (
    OPERATION_KEY,
    accepts_log_message,
    minimum_level,
    relayed_meta,
)
from decathlon_mcp.protocol.results import (
    INTERNAL_ERROR,
    TOOL_FAILURES,
    envelope_members,
    error_result,
    relayed_error,
    wire_error,
)
from decathlon_mcp.protocol.resumption import (
    FAST_SECONDS,
    PING,
    PING_SECONDS,
    RequestStream,
    SessionStreams,
    event_frame,
    request_id_text,
    send_body,
    send_event_head,
    start_stream,
)
from decathlon_mcp.protocol.sdk import SessionRequest, SessionTransport
from decathlon_mcp.types import JsonObject, as_json, as_object

_log = logging.getLogger("decathlon.protocol")

LEAVING_SECONDS = 0.5
"""How long the answer to a cancelled call waits for its client to leave. The Python client often closes its
connection after a cancellation, and fails if an answer comes while it does."""
LEAVING_CHECKS = 10

StartSoon: TypeAlias = Callable[..., None]
"""Runs a function in the background: `start_soon(function, *arguments)`."""
OnGone: TypeAlias = Callable[[], object]


@dataclass(slots=True, eq=False)
class FastCall:
    """One call. It is served once."""

    call: ToolCall
    access: EpisodeAccess
    request_context: RequestContext
    start_soon: StartSoon
    modern: ClassVar[bool] = False
    """Whether the response has the form of revisions without sessions."""

    async def serve(self, receive: Receive, send: Send, on_gone: OnGone) -> None:
        """Send the whole response. `on_gone` is called if the call goes on without its client."""
        raise NotImplementedError

    async def answer(self, caller: Caller) -> tuple[int, bytes]:
        """Make the call. Returns the HTTP status and the JSON-RPC message that answer the request."""
        call, request_context = self.call, self.request_context
        request_context.called_at = perf_counter()
        try:
            params = CallParams(call.arguments, relayed_meta(call.meta))
            reply = await self.access.episode.call(call.name, params, caller=caller)
            request_context.replied_at = perf_counter()
            if reply.result is None:
                return self.error(relayed_error(reply.error or {}).error)
            members = envelope_members(reply.meta) if self.modern else None
            return 200, self._result(reply.result if members is None else reply.result_with(members))
        except DecathlonError as error:
            if error.code not in TOOL_FAILURES:
                return self.error(wire_error(error).error)
            failure = error_result(error)
            members = envelope_members(as_object(failure.get("_meta")) or {}) if self.modern else {}
            return 200, self._result(as_json({**failure, **members}))
        except Exception:  # noqa: BLE001  (as the SDK does: the client gets an answer)
            _log.exception("a call failed")
            return self.error(ErrorData(code=INTERNAL_ERROR, message="Internal server error"))

    def error(self, error: ErrorData) -> tuple[int, bytes]:
        """HTTP status and JSON-RPC message of an error."""
        status = ERROR_CODE_HTTP_STATUS.get(error.code, 200) if self.modern else 200
        content = error.model_dump(exclude_unset=True, exclude_none=self.modern)
        return status, as_json({"jsonrpc": "2.0", "id": self.call.id, "error": content})

    def _result(self, result: bytes) -> bytes:
        return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (request_id_text(self.call.id).encode(), result)


@dataclass(slots=True, eq=False)
class JsonCall(FastCall):
    """A call in a session, answered with one JSON body."""

    transport: SessionTransport
    connection: Connection

    async def serve(self, receive: Receive, send: Send, on_gone: OnGone) -> None:
        with self.transport.serving(self.call.id) as request:
            is_gone = partial(is_disconnected, receive)
            status, message = await self._answer_in_session(request, is_gone, self._notify)
            await _send_json(send, status, message, self.transport.mcp_session_id or "")

    async def _answer_in_session(
        self,
        request: SessionRequest,
        is_gone: Callable[[], Awaitable[bool]],
        on_message: Callable[[JsonObject], Awaitable[None]],
    ) -> tuple[int, bytes]:
        """Make the call until it is cancelled, by the client or by the end of the session."""
        operation = self.call.meta.get(OPERATION_KEY)
        if operation is None:
            operation = f"{self.transport.mcp_session_id}:{request_id_text(self.call.id)}"
        caller = Caller(operation=operation, is_gone=is_gone, on_message=on_message)
        with request.scope:
            return await self.answer(caller)
        if request.session_ended:
            return 500, _SESSION_ENDED
        for _ in range(LEAVING_CHECKS):
            if await is_gone():
                break
            await anyio.sleep(LEAVING_SECONDS / LEAVING_CHECKS)
        return self.error(ErrorData(code=REQUEST_CANCELLED, message="Request cancelled"))

    def _accepts(self, params: JsonObject) -> bool:
        return accepts_log_message(params, minimum_level(self.connection))

    async def _notify(self, params: JsonObject) -> None:
        if self._accepts(params):
            # One JSON body cannot carry it; the session's GET stream does, if there is one.
            await self.connection.outbound.notify("notifications/message", params)


_SESSION_ENDED = as_json(
    {
        "jsonrpc": "2.0",
        "id": None,
        "error": {"code": INTERNAL_ERROR, "message": "Session terminated before the request completed"},
    }
)
"""What the SDK answers to a request whose session ends."""


@dataclass(slots=True, eq=False)
class StreamedCall(JsonCall):
    """A call in a session, answered with events that the client can fetch again.

    A call that takes long, or has something to send before its answer, gets a task that sends the events and
    notices that the client is gone. Most calls need none.
    """

    streams: SessionStreams
    stream: RequestStream

    async def serve(self, receive: Receive, send: Send, on_gone: OnGone) -> None:
        stream = self.stream
        follower = _Follower(self.start_soon, partial(self._follow, receive, send, on_gone))

        async def is_gone() -> bool:
            # A client that came back reads the stream on another connection.
            return not stream.readers and await is_disconnected(receive)

        async def on_message(params: JsonObject) -> None:
            if self._accepts(params):
                follower.start()
                stream.add_notification(
                    JSONRPCNotification(jsonrpc="2.0", method="notifications/message", params=params)
                )

        with self.transport.serving(self.call.id) as request:
            try:
                # Before the call is made, so that a client whose server dies can come back with its id.
                await start_stream(send, stream.session, stream, self.streams.generation)
                with follower:
                    _, message = await self._answer_in_session(request, is_gone, on_message)
            except BaseException:
                self.streams.abandon(stream)
                raise
            if request.session_ended:
                stream.end()
            elif not stream.complete:
                self.streams.answer(stream, message)
            if follower.started:
                await follower.wait()
            else:
                await stream.send_answer(send)

    async def _follow(self, receive: Receive, send: Send, on_gone: OnGone) -> None:
        await self.stream.send(receive, send, at_once=True)
        if not self.stream.complete:
            on_gone()


@dataclass(slots=True, eq=False)
class SessionlessCall(FastCall):
    """A call without a session, answered with one JSON body, or with events after PING_SECONDS."""

    modern: ClassVar[bool] = True
    _sends_events: bool = False

    async def serve(self, receive: Receive, send: Send, on_gone: OnGone) -> None:
        operation = self.call.meta.get(OPERATION_KEY)
        # A client that loses its connection and one that cancels look the same. One that chose an operation
        # comes back.
        caller = Caller(
            operation=operation,
            detached=operation is not None,
            is_gone=partial(is_disconnected, receive),
        )
        answer: tuple[int, bytes] | None = None
        scope = anyio.CancelScope()
        follower = _Follower(self.start_soon, partial(self._follow, receive, send, scope))
        try:
            with scope, follower:
                answer = await self.answer(caller)
        finally:
            await follower.stop()
        if answer is None:
            return  # the client is gone
        status, message = answer
        if self._sends_events:
            await send_body(send, event_frame(message), more=False)
        else:
            await _send_json(send, status, message)

    async def _follow(self, receive: Receive, send: Send, scope: anyio.CancelScope) -> None:
        """Cancel the call when the client is gone, and keep the connection busy."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_until_disconnected, receive, scope.cancel)
            await anyio.sleep(PING_SECONDS - FAST_SECONDS)
            await send_event_head(send)
            self._sends_events = True
            while True:
                await send_body(send, PING, more=True)
                await anyio.sleep(PING_SECONDS)


class _Follower:
    """A task that accompanies a call, from FAST_SECONDS after its beginning, or from `start` on.

    As a context manager it includes the call. The task may go on afterwards.
    """

    def __init__(self, start_soon: StartSoon, follow: Callable[[], Awaitable[None]]) -> None:
        self._start_soon = start_soon
        self._follow = follow
        self._task: _Task | None = None

    def __enter__(self) -> _Follower:
        # Most calls end before. A timer costs a tenth of a task.
        self._timer = asyncio.get_running_loop().call_later(FAST_SECONDS, self.start)
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    @property
    def started(self) -> bool:
        return self._task is not None

    def start(self) -> None:
        """Start the task, if it has not been started."""
        if self._task is None:
            task = _Task()
            self._start_soon(task.run, self._follow)
            self._task = task

    async def wait(self) -> None:
        """Wait for the end of the task, if it was started."""
        if self._task is not None:
            await self._task.ended.wait()

    async def stop(self) -> None:
        """End the task, if it was started."""
        if self._task is not None:
            self._task.scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._task.ended.wait()


class _Task:
    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()

    async def run(self, function: Callable[[], Awaitable[None]]) -> None:
        try:
            with self.scope:
                await function()
        except Exception:  # noqa: BLE001
            # In the session manager's task group it would end all sessions.
            _log.exception("a response could not be sent")
        finally:
            self.ended.set()


async def _send_json(send: Send, status: int, message: bytes, session_id: str = "") -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(message))]
    if session_id:
        headers.append((b"mcp-session-id", session_id.encode("ascii")))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send_body(send, message, more=False)
