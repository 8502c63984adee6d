"""Requests for tools over HTTP that are served without the SDK: from the checked request to the last byte.

What serves a request is one `async` function of a `ToolRequest`, the same for every address and form of
response. What differs between the forms is here:

- In a session whose client can come back for an answer: events, the first of which has the id that it comes
  back with. Losing the connection changes nothing.
- In another session: one JSON body, or events if the client asked for progress or the answer can take long.
- Without a session: one JSON body, or events once there is something to send before the answer. A disconnect
  cancels the request.

Of the SDK, what a request in a session depends on remains: the session's idle time,
`notifications/cancelled`, and the end of the session (`sdk.SessionTransport.begin_request`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import anyio
from mcp.server.connection import Connection
from mcp.server.streamable_http import REQUEST_CANCELLED
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import ERROR_CODE_HTTP_STATUS
from mcp_types import PROTOCOL_VERSION_META_KEY, ErrorData
from msgspec.structs import replace
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from decathlon_mcp.background import LazyTimer
from decathlon_mcp.driver_client.replies import Reply
from decathlon_mcp.errors import AtCapacityError, DecathlonError, LimitExceededError
from decathlon_mcp.protocol.context import RequestContext, is_disconnected, wait_until_disconnected
from decathlon_mcp.protocol.requests import (
    CALL,
    EventId,
    Kind,
    McpRequest,
    Result,
    ToolRequest,
)
from decathlon_mcp.protocol.results import (
    INTERNAL_ERROR,
    envelope_members,
    error_result,
    relayed_error,
    wire_error,
)
from decathlon_mcp.protocol.sdk import SessionRequest, SessionTransport
from decathlon_mcp.storage.logged_calls import request_id_text
from decathlon_mcp.types import JsonObject, as_json, as_object

_log = logging.getLogger("decathlon.protocol")
PING_SECONDS = 15.0
"""Time between two comments on a silent stream: clients and proxies close silent connections."""
PING = b": ping\r\n\r\n"
_EVENT_STREAM_HEADERS = (
    (b"cache-control", b"no-cache, no-transform"),
    (b"connection", b"keep-alive"),
    (b"content-type", b"text/event-stream"),
    (b"x-accel-buffering", b"no"),
)
FAST_SECONDS = 0.25
"""A request that takes longer notices that its client is gone; before, watching costs more than it saves."""
MAX_EVENT_BYTES = (1 << 20) - 1024
"""Longest answer in an event. The Python SDK (2.1 and later) ends its session, and all calls, over 1 MiB."""
LARGE_EVENTS_HEADER = "Decathlon-Large-Events"
"""Header of clients that take an event of any length: `decathlon_client` and its bridge."""
LARGE_EVENTS_AGENTS = ("node", "undici", "Bun/", "Deno/", "python-httpx/")
"""Beginnings of the `User-Agent` of clients that do: the TypeScript SDKs, and the Python SDK 1.x."""
MAX_WAITING = 256
"""Requests of one session that wait for their answers."""
LEAVING_SECONDS = 0.5
"""How long the answer to a cancelled request waits for its client to leave. The Python client often closes
its connection after a cancellation, and complains of an answer that comes while it does."""
LEAVING_CHECKS = 10
Serve = Callable[[ToolRequest], Awaitable[Result]]
StartSoon = Callable[..., None]
"""Runs a function in the background: `start_soon(function, *arguments)`."""
_SESSION_ENDED = as_json(
    {
        "jsonrpc": "2.0",
        "id": None,
        "error": {"code": INTERNAL_ERROR, "message": "Session terminated before the request completed"},
    }
)
"""What the SDK answers to a request whose session ends."""


class Watch:
    """Has every exchange watched that takes longer than FAST_SECONDS."""

    # One timer for all: a timer of the event loop for each costs more than most of what a call needs.
    def __init__(self, start_soon: StartSoon) -> None:
        self._start_soon = start_soon
        self._timer = LazyTimer(self._look)
        # Those that are not watched yet, and when they began; the oldest is first.
        self._unwatched: dict[Exchange, float] = {}

    def add(self, exchange: Exchange) -> None:
        """An exchange begins."""
        began_at = asyncio.get_running_loop().time()
        if not self._unwatched:
            self._timer.set(began_at + FAST_SECONDS)
        self._unwatched[exchange] = began_at

    def at_once(self, exchange: Exchange) -> None:
        """An exchange begins that is watched from the beginning."""
        self._start_soon(exchange.watch)

    def remove(self, exchange: Exchange) -> None:
        """An exchange has ended."""
        self._unwatched.pop(exchange, None)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        for exchange, began_at in list(self._unwatched.items()):
            if began_at + FAST_SECONDS > now:
                self._timer.set(began_at + FAST_SECONDS)
                return
            del self._unwatched[exchange]
            self._start_soon(exchange.watch)


class Exchange(ToolRequest):
    """One request, and its response.

    `transport`: of the session, if there is one. `generation`: of this server, if the client can come back
    for the answer. `resumed`: it has done so, with this event's id. `on_gone` is called once if the client
    leaves before it has the answer; with `watched`, that is noticed from the beginning. `answered`: the whole
    response was sent while it was there, as far as is known.
    """

    def __init__(
        self,
        message: McpRequest,
        context: RequestContext,
        *,
        connection: Connection | None,
        transport: SessionTransport | None,
        watch: Watch,
        scope: Scope,
        can_stream: bool,
        generation: int | None = None,
        resumed: EventId | None = None,
    ) -> None:
        super().__init__(
            message,
            context,
            connection=connection,
            is_sessionless=transport is None,
            can_stream=can_stream or generation is not None or transport is None,
        )
        self.resumed = resumed
        self.starts_episode = message.starts_episode or (resumed is not None and resumed.kind is Kind.START)
        self.answered = False
        self.watched = False
        self.on_gone: Callable[[], object] = context.abandon
        self._transport = transport
        self._watch = watch
        self._http_scope = scope
        self._generation = generation
        context.may_return = generation is not None
        self._scope: anyio.CancelScope | None = None
        self._watching: anyio.CancelScope | None = None
        self._event_id: EventId | None = None
        self._sends_events = False
        self._is_answering = False
        self._is_gone = False
        self._request: SessionRequest | None = None
        self._writing: anyio.Lock | None = None

    async def serve(self, serve: Serve, receive: Receive, send: Send) -> None:
        """Send the response: what `serve` returns, or the error that it raises."""
        self._receive, self._send = receive, send
        self._scope = scope = anyio.CancelScope()
        transport = self._transport
        request = None if transport is None else transport.begin_request(self.id, scope.cancel)
        self._request = request
        if self.watched:
            self._watch.at_once(self)
        else:
            self._watch.add(self)
        try:
            answer: tuple[int, bytes] | None = None
            with scope:
                if self.resumed is not None:
                    await self.accepted(self.resumed.kind, agent=self.resumed.agent)
                answer = await self._outcome(serve)
            if answer is not None:
                await self._answer(*answer)
            elif request is None:
                pass  # the client is gone
            elif request.session_ended:
                await self._end_with_session()
            else:
                await self._answer(*await self._cancelled())
        finally:
            self._is_answering = True
            self._watch.remove(self)
            if self._watching is not None:
                self._watching.cancel()
            if transport is not None and request is not None:
                transport.end_request(request)

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
        if self.is_sessionless and self._scope is not None:
            self._scope.cancel()
        elif self.resumed is not None and self._transport is not None and self._request is not None:
            # A client that comes back again and again would leave a request each time.
            self._transport.leave_to_another(self._request)

    def _lose_client(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            self.on_gone()

    # as `ToolRequest`

    @property
    def base_url(self) -> str | None:
        return self.context.public_url or str(Request(self._http_scope).base_url).rstrip("/")

    @property
    def is_http(self) -> bool:
        return True

    @property
    def protocol_version(self) -> str:
        if self.connection is not None:
            return self.connection.protocol_version
        return str(self.meta[PROTOCOL_VERSION_META_KEY])  # as `Recognition` has checked

    def http_header(self, name: str) -> str | None:
        return Headers(scope=self._http_scope).get(name)

    async def accepted(self, kind: Kind, *, agent: str = "") -> None:
        if self._generation is None or self._event_id is not None:
            return
        self._event_id = EventId(self._generation, kind, self.id, agent)
        await self._send_event(first_event(self._event_id))

    async def notify(self, method: str, params: JsonObject, *, with_reply: bool = True) -> None:
        if with_reply and self.can_stream:
            notification = {"jsonrpc": "2.0", "method": method, "params": params}
            await self._send_event(event_frame(as_json(notification)))
        elif self.connection is not None:
            await self.connection.outbound.notify(method, params)

    async def is_gone(self) -> bool:
        return await is_disconnected(self._receive)

    # the response

    async def _outcome(self, serve: Serve) -> tuple[int, bytes]:
        """The HTTP status and the JSON-RPC message that answer the request."""
        try:
            self._refuse_if_too_many()
            return 200, self._message(await serve(self))
        except DecathlonError as error:
            return self._error(wire_error(error).error)
        except MCPError as error:
            return self._error(error.error)
        except Exception:  # noqa: BLE001  (as the SDK does: the client gets an answer)
            _log.exception("a request failed")
            return self._error(ErrorData(code=INTERNAL_ERROR, message="Internal server error"))

    def _refuse_if_too_many(self) -> None:
        if self._transport is not None and self._transport.waiting_requests > MAX_WAITING:
            raise AtCapacityError(
                f"{MAX_WAITING} requests of this session wait for their answers", retryAfterSeconds=1.0
            )

    def _message(self, result: Result) -> bytes:
        """The JSON-RPC message with a result. Raises MCPError for a reply that is an error."""
        if not isinstance(result, Reply):
            if self.is_sessionless:
                result = {**result, **envelope_members(as_object(result.get("_meta")) or {})}
            text = as_json(result)
        elif result.result is None:
            raise relayed_error(result.error or {})
        else:
            members = envelope_members(result.meta) if self.is_sessionless else None
            text = result.result if members is None else result.result_with(members)
        return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (request_id_text(self.id).encode(), text)

    def _error(self, error: ErrorData) -> tuple[int, bytes]:
        status = ERROR_CODE_HTTP_STATUS.get(error.code, 200) if self.is_sessionless else 200
        content = error.model_dump(exclude_unset=True, exclude_none=self.is_sessionless)
        return status, as_json({"jsonrpc": "2.0", "id": self.id, "error": content})

    async def _cancelled(self) -> tuple[int, bytes]:
        for _ in range(LEAVING_CHECKS):
            if await self.is_gone():
                break
            await anyio.sleep(LEAVING_SECONDS / LEAVING_CHECKS)
        # With an event before it, the answer is one as well: a JSON body that comes while the Python client
        # closes its connection fails the whole client (`_handle_json_response` of mcp 2.3.0).
        await self._send_event(PING)
        return self._error(ErrorData(code=REQUEST_CANCELLED, message="Request cancelled"))

    async def _end_with_session(self) -> None:
        self._is_answering = True
        if self._sends_events:
            await send_body(self._send, b"", more=False)
        else:
            await send_json(self._send, 500, _SESSION_ENDED, self.session_id)

    def _fits_event(self, message: bytes) -> bytes:
        """The message, or if the client may not take it as one event, an error in its place."""
        if len(message) <= MAX_EVENT_BYTES or self._takes_large_events:
            return message
        error = LimitExceededError(
            f"the reply has {len(message)} bytes, more than the {MAX_EVENT_BYTES} that this client may take",
            limit_bytes=MAX_EVENT_BYTES,
        )
        if self.method == CALL:
            return self._message(error_result(error))
        return self._error(wire_error(error).error)[1]

    @property
    def _takes_large_events(self) -> bool:
        agent = self.http_header("User-Agent") or ""
        return self.http_header(LARGE_EVENTS_HEADER) is not None or agent.startswith(LARGE_EVENTS_AGENTS)

    async def _answer(self, status: int, message: bytes) -> None:
        if self.starts_episode and await self.is_gone():
            # Before the answer: afterwards, a client that has it looks the same.
            self._lose_client()
        self._is_answering = True
        if self._writing is not None:
            async with self._writing:
                pass  # a ping in progress
        if self._sends_events:
            event_id = self._event_id
            if event_id is not None:
                event_id = replace(event_id, is_answer=True)
            await send_body(self._send, event_frame(self._fits_event(message), event_id), more=False)
        else:
            await send_json(self._send, status, message, self.session_id)
        self.answered = not self._is_gone

    async def _send_event(self, frame: bytes) -> None:
        """Send what comes before the answer."""
        self._writing = self._writing or anyio.Lock(fast_acquire=True)
        async with self._writing:
            if self._is_answering:
                return
            if not self._sends_events:
                self._sends_events = True
                await send_event_head(self._send, self.session_id)
            await send_body(self._send, frame, more=True)


def event_frame(message: bytes, event_id: EventId | None = None) -> bytes:
    """An event with a JSON-RPC message, which must be on one line."""
    prefix = b"" if event_id is None else b"id: %b\r\n" % str(event_id).encode()
    return b"%bevent: message\r\ndata: %b\r\n\r\n" % (prefix, message)


def first_event(event_id: EventId) -> bytes:
    """The first event of a stream that a client can come back to."""
    return b"id: %b\r\ndata: \r\n\r\n" % str(event_id).encode()


async def send_event_head(send: Send, session_id: str | None) -> None:
    """Send the head of a response that is a stream of events."""
    session = () if session_id is None else ((b"mcp-session-id", session_id.encode("ascii")),)
    headers = [*_EVENT_STREAM_HEADERS, *session]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_json(send: Send, status: int, message: bytes, session_id: str | None) -> None:
    """Send a whole response with a JSON body."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(message))]
    if session_id is not None:
        headers.append((b"mcp-session-id", session_id.encode("ascii")))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send_body(send, message, more=False)


async def send_body(send: Send, body: bytes, *, more: bool) -> None:
    """Send a part of a response's body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})
