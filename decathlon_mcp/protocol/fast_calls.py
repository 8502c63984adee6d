"""Tool calls that are served without the SDK: from the decoded request to the last byte of the response.

The call's reply is relayed as the bytes that the driver sent. Of the SDK, what a call in a session depends on
remains: the session's idle time, `notifications/cancelled`, and the end of the session
(`sdk.SessionTransport.begin_request`); the log level, and the stream for what is not part of a reply.

Three forms of response, as the SDK and `resumption` would give:

- `JsonCall`: one JSON body. The client's connection is not watched: the call goes on without it.
- `StreamedCall`: events that the client can fetch again on another connection.
- `SessionlessCall`: one JSON body, or events once the call takes long. A disconnect cancels the call.

Most calls need no task: the response is written when the reply arrives (`FastCall.begin`). A task continues
where something else has to be waited for: a call that takes long, has something to send before its answer, is
cancelled, or fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import ClassVar, Protocol, TypeAlias

import anyio
from mcp.server.connection import Connection
from mcp.server.streamable_http import REQUEST_CANCELLED
from mcp.shared.inbound import ERROR_CODE_HTTP_STATUS
from mcp_types import ErrorData, JSONRPCNotification
from starlette.types import Receive, Send

from decathlon_mcp.background import Alarms, Cancellation
from decathlon_mcp.driver_client.replies import CallParams, Reply
from decathlon_mcp.episodes.episode import EpisodeAccess
from decathlon_mcp.episodes.operations import Caller, RunningCall
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
    EVENT_STREAM_HEADERS,
    FAST_SECONDS,
    PING,
    PING_SECONDS,
    RequestStream,
    SessionStreams,
    event_frame,
    priming_event,
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
Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Background:
    """What goes on beside calls: tasks, and alarms for calls that take longer than FAST_SECONDS."""

    start_soon: StartSoon
    alarms: Alarms = field(default_factory=Alarms)


class Response(Protocol):
    """The response to a request, which no task has to write."""

    @property
    def receive(self) -> Receive:
        """As an ASGI application's `receive`, after the request's body."""
        ...

    @property
    def is_writable(self) -> bool:
        """Whether the client reads what is written."""
        ...

    def begin(self, status: int, headers: Headers, body: bytes, *, more: bool) -> None:
        """Write the head and the first part of the body. With `more`, the rest follows."""
        ...

    def end(self, body: bytes) -> None:
        """Write the last part of the body."""
        ...

    def continue_in_task(self, serve: Callable[[Receive, Send], Awaitable[None]]) -> None:
        """Have a task write what is left of the response."""
        ...

    def abort(self) -> None:
        """Break the connection off."""
        ...


class Client(Protocol):
    """The client of a request, which is there from before the call until `end`."""

    answered: bool
    """Whether it was sent the whole response."""

    def sending(self, send: Send) -> Send:
        """A `send` that sets `answered`."""
        ...

    def release(self) -> object:
        """It is gone, and the call goes on."""
        ...

    def end(self) -> None:
        """The request has been served."""
        ...


@dataclass(slots=True, eq=False)
class FastCall:
    """One call. It is served once, by `serve` or by `begin`."""

    call: ToolCall
    access: EpisodeAccess
    request_context: RequestContext
    background: Background
    modern: ClassVar[bool] = False
    """Whether the response has the form of revisions without sessions."""
    watched: ClassVar[bool] = True
    """Whether a call that takes long needs a task that watches its client."""
    _receive: Receive | None = field(default=None, init=False)
    _client: Client | None = field(default=None, init=False)
    # The rest is for a call that has begun without a task.
    _response: Response | None = field(default=None, init=False)
    _is_long: bool = field(default=False, init=False)
    _running: RunningCall | None = field(default=None, init=False)
    _caller: Caller | None = field(default=None, init=False)

    async def serve(self, receive: Receive, send: Send, client: Client) -> None:
        """Send the whole response."""
        self._receive, self._client = receive, client
        send = client.sending(send)
        self._enter()
        try:
            await self._send_beginning(send)
            await self._serve(send)
        finally:
            self._end()

    def begin(self, response: Response, client: Client) -> None:
        """Serve the call without a task as long as nothing but its reply has to be waited for."""
        self._receive, self._client, self._response = response.receive, client, response
        self._enter()
        try:
            self._write_beginning(response)
            self._caller = caller = self._new_caller()
            self.request_context.called_at = perf_counter()
            running = self.access.episode.begin_call(self.call.name, self._params, caller.operation)
        except BaseException:
            self._abandon()
            self._end()
            raise
        self._running = running
        if running is None or running.is_finished:
            self._continue()
            return
        running.watch(caller, self._on_change)
        if self.watched:
            self.background.alarms.add(self._on_long, FAST_SECONDS)

    @property
    def _params(self) -> CallParams:
        return CallParams(self.call.arguments, relayed_meta(self.call.meta))

    def _on_change(self) -> None:
        """The call has ended, or has something to send before. Does not raise."""
        response, running = self._response, self._running
        if response is None or running is None:
            return  # a task continues
        reply = running.outcome
        if running.is_finished and isinstance(reply, Reply) and response.is_writable:
            self._response = None
            self.request_context.replied_at = perf_counter()
            try:
                self._write_answer(response, *self._answer_to(reply))
                if self._client is not None:
                    self._client.answered = True
            except Exception:  # noqa: BLE001
                _log.exception("a response could not be written")
                response.abort()
            finally:
                self._end()
        else:
            self._continue()

    def _end(self) -> None:
        """The call has been served."""
        self._leave()
        self.background.alarms.remove(self._on_long)
        if self._client is not None:
            self._client.end()
        # They refer to this object. Without cycles, its memory is free at once for the next call.
        self._running = self._caller = None

    def _on_long(self) -> None:
        self._is_long = True
        self._continue()

    def _continue(self) -> None:
        """Have a task continue, if none does."""
        if self._response is not None:
            response, self._response = self._response, None
            response.continue_in_task(self._serve_rest)

    async def _serve_rest(self, receive: Receive, send: Send) -> None:
        assert self._client is not None
        try:
            await self._serve(self._client.sending(send))
        finally:
            self._end()

    # What differs between the forms of response.

    def _enter(self) -> None:
        """The call is about to be served."""

    def _leave(self) -> None:
        """The call has been served."""

    def _abandon(self) -> None:
        """The call could not be served."""

    async def _send_beginning(self, send: Send) -> None:
        """Send what comes before the call is made."""

    def _write_beginning(self, response: Response) -> None:
        """Write what comes before the call is made."""

    def _write_answer(self, response: Response, status: int, message: bytes) -> None:
        """Write what comes after the reply."""
        raise NotImplementedError

    async def _serve(self, send: Send) -> None:
        """Make the call, unless it was begun, and send the rest of the response."""
        raise NotImplementedError

    def _new_caller(self) -> Caller:
        raise NotImplementedError

    async def _is_gone(self) -> bool:
        """Whether the connection broke on which the client waits."""
        assert self._receive is not None
        return await is_disconnected(self._receive)

    # The call's outcome.

    async def _answer(self) -> tuple[int, bytes]:
        """Make the call, unless it was begun, and wait for it.

        Returns the HTTP status and the JSON-RPC message that answer the request.
        """
        episode, request_context = self.access.episode, self.request_context
        try:
            if self._running is not None and self._caller is not None:
                reply = await episode.reply_of(self._running, self._caller)
            else:
                request_context.called_at = perf_counter()
                reply = await episode.call(self.call.name, self._params, caller=self._new_caller())
            request_context.replied_at = perf_counter()
            return self._answer_to(reply)
        except DecathlonError as error:
            if error.code not in TOOL_FAILURES:
                return self._error(wire_error(error).error)
            failure = error_result(error)
            members = envelope_members(as_object(failure.get("_meta")) or {}) if self.modern else {}
            return 200, self._result(as_json({**failure, **members}))
        except Exception:  # noqa: BLE001  (as the SDK does: the client gets an answer)
            _log.exception("a call failed")
            return self._error(ErrorData(code=INTERNAL_ERROR, message="Internal server error"))

    def _answer_to(self, reply: Reply) -> tuple[int, bytes]:
        if reply.result is None:
            return self._error(relayed_error(reply.error or {}).error)
        members = envelope_members(reply.meta) if self.modern else None
        return 200, self._result(reply.result if members is None else reply.result_with(members))

    def _error(self, error: ErrorData) -> tuple[int, bytes]:
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
    watched: ClassVar[bool] = False
    _request: SessionRequest | None = field(default=None, init=False)

    def _enter(self) -> None:
        self._request = self.transport.begin_request(self.call.id, self._continue)

    def _leave(self) -> None:
        assert self._request is not None
        self.transport.end_request(self._request)
        self._request = None

    def _new_caller(self) -> Caller:
        operation = self.call.meta.get(OPERATION_KEY)
        if operation is None:
            operation = f"{self.transport.mcp_session_id}:{request_id_text(self.call.id)}"
        return Caller(operation=operation, is_gone=self._is_gone, on_message=self._on_message)

    def _write_answer(self, response: Response, status: int, message: bytes) -> None:
        _write_json(response, status, message, self.transport.mcp_session_id or "")

    async def _serve(self, send: Send) -> None:
        status, message = await self._answer_in_session()
        await _send_json(send, status, message, self.transport.mcp_session_id or "")

    async def _answer_in_session(self) -> tuple[int, bytes]:
        """Make the call until it is cancelled, by the client or by the end of the session."""
        request = self._request
        assert request is not None
        with request.scope:
            return await self._answer()
        if request.session_ended:
            return 500, _SESSION_ENDED
        for _ in range(LEAVING_CHECKS):
            if await self._is_gone():
                break
            await anyio.sleep(LEAVING_SECONDS / LEAVING_CHECKS)
        return self._error(ErrorData(code=REQUEST_CANCELLED, message="Request cancelled"))

    async def _on_message(self, params: JsonObject) -> None:
        if self._accepts(params):
            # One JSON body cannot carry it; the session's GET stream does, if there is one.
            await self.connection.outbound.notify("notifications/message", params)

    def _accepts(self, params: JsonObject) -> bool:
        return accepts_log_message(params, minimum_level(self.connection))


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
    watched: ClassVar[bool] = True
    _follower: _Follower | None = field(default=None, init=False)

    async def _send_beginning(self, send: Send) -> None:
        # Before the call is made, so that a client whose server dies can come back with its id.
        try:
            await start_stream(send, self.stream.session, self.stream, self.streams.generation)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        self.streams.abandon(self.stream)

    def _write_beginning(self, response: Response) -> None:
        headers = (*EVENT_STREAM_HEADERS, (b"mcp-session-id", self.stream.session.encode()))
        response.begin(200, headers, priming_event(self.stream, self.streams.generation), more=True)

    def _write_answer(self, response: Response, status: int, message: bytes) -> None:
        stream = self.stream
        if not stream.complete:
            self.streams.answer(stream, message)
        answer = stream.answer
        response.end(answer or b"")
        if answer is not None:
            stream.mark_answered()

    async def _serve(self, send: Send) -> None:
        stream, request = self.stream, self._request
        assert request is not None
        self._follower = follower = _Follower(self.background.start_soon, partial(self._follow, send))
        try:
            if self._is_long:
                follower.start()
            with follower:
                _, message = await self._answer_in_session()
        except BaseException:
            self._abandon()
            raise
        if request.session_ended:
            stream.end()
        elif not stream.complete:
            self.streams.answer(stream, message)
        if follower.started:
            await follower.wait()
        else:
            await stream.send_answer(send)

    async def _is_gone(self) -> bool:
        # A client that came back reads the stream on another connection.
        return not self.stream.readers and await JsonCall._is_gone(self)

    async def _on_message(self, params: JsonObject) -> None:
        if self._accepts(params):
            assert self._follower is not None
            self._follower.start()
            self.stream.add_notification(
                JSONRPCNotification(jsonrpc="2.0", method="notifications/message", params=params)
            )

    async def _follow(self, send: Send) -> None:
        assert self._receive is not None
        await self.stream.send(self._receive, send, at_once=True)
        if not self.stream.complete and self._client is not None:
            self._client.release()


@dataclass(slots=True, eq=False)
class SessionlessCall(FastCall):
    """A call without a session, answered with one JSON body, or with events after PING_SECONDS."""

    modern: ClassVar[bool] = True
    _sends_events: bool = field(default=False, init=False)

    def _new_caller(self) -> Caller:
        operation = self.call.meta.get(OPERATION_KEY)
        # A client that loses its connection and one that cancels look the same. One that chose an operation
        # comes back.
        return Caller(operation=operation, detached=operation is not None, is_gone=self._is_gone)

    def _write_answer(self, response: Response, status: int, message: bytes) -> None:
        _write_json(response, status, message)

    async def _serve(self, send: Send) -> None:
        answer: tuple[int, bytes] | None = None
        scope = Cancellation()
        follower = _Follower(self.background.start_soon, partial(self._follow, send, scope))
        try:
            if self._is_long:
                follower.start()
            with scope, follower:
                answer = await self._answer()
        finally:
            await follower.stop()
        if answer is None:
            return  # the client is gone
        status, message = answer
        if self._sends_events:
            await send_body(send, event_frame(message), more=False)
        else:
            await _send_json(send, status, message)

    async def _follow(self, send: Send, scope: Cancellation) -> None:
        """Cancel the call when the client is gone, and keep the connection busy."""
        assert self._receive is not None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_until_disconnected, self._receive, scope.cancel)
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
        finally:
            self.ended.set()


def _json_headers(message: bytes, session_id: str) -> Headers:
    headers = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(message)))
    return (*headers, (b"mcp-session-id", session_id.encode("ascii"))) if session_id else headers


def _write_json(response: Response, status: int, message: bytes, session_id: str = "") -> None:
    response.begin(status, _json_headers(message, session_id), message, more=False)


async def _send_json(send: Send, status: int, message: bytes, session_id: str = "") -> None:
    headers = _json_headers(message, session_id)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send_body(send, message, more=False)
