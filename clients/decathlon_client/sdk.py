"""The MCP SDK, versions 1.24 to 2.x; no other module depends on the installed version.

Requests and results are plain JSON here, because the SDK's models differ between 1.x and 2.x.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import anyio
import mcp.shared.exceptions
from mcp import ClientSession, types
from mcp.client.streamable_http import streamable_http_client
from pydantic import RootModel, ValidationError

from decathlon_client.client_values import DIRECT, JsonObject, OnProgress, as_object

if TYPE_CHECKING:
    import httpx2 as httpx

CONNECT_SECONDS = 30.0
"""How long a server may take to accept a connection: hundreds of clients may connect at once."""
CANCEL_SECONDS = 5.0
"""How long telling the server about a cancelled request may take."""
MAX_MESSAGE_BYTES = 64 << 20
"""Longest body, or event of a stream, that is taken. A list of two thousand tasks with prompts has 20 MB."""
UNCOMPRESSED = {"Accept-Encoding": "identity"}
"""Headers of all requests: what is compressed could be of any length when it is read."""
END_SECONDS = 0.1
"""How long a stream that is closed may take to its end."""
CLOSED_STREAM_ERRORS = (anyio.ClosedResourceError, anyio.BrokenResourceError)
"""What a stream of the SDK raises after its other end was closed."""

_exceptions: Any = mcp.shared.exceptions
_any_types: Any = types
IS_1X = not hasattr(_exceptions, "MCPError")
NO_EVENT_LIMIT: dict[str, Any] = (
    {"max_sse_event_size": None}
    if "max_sse_event_size" in inspect.signature(streamable_http_client).parameters
    else {}
)
"""Arguments with which `streamable_http_client` takes an event of any length, where it has them."""
# The first versions of mcp 2 have no such argument, but the limit of httpx2, which is 1 MiB.
LARGE_EVENTS = {"Decathlon-Large-Events": "yes"} if IS_1X or NO_EVENT_LIMIT else {}
"""Headers of a client that takes an event of any length. Without them, a server sends none over 1 MiB."""
SdkError: type[Exception] = _exceptions.McpError if IS_1X else _exceptions.MCPError

if not TYPE_CHECKING:
    httpx = importlib.import_module("httpx" if IS_1X else "httpx2")

_REQUESTS: dict[str, Any] = {"tools/list": types.ListToolsRequest, "tools/call": types.CallToolRequest}

__all__ = [
    "CLOSED_STREAM_ERRORS",
    "IS_1X",
    "ErrorResponse",
    "SdkError",
    "Session",
    "ValidationError",
    "cause_of",
    "http_client",
    "http_session",
    "httpx",
    "json_rpc_error",
]


class _Raw(RootModel[dict[str, Any]]):
    """A result as received; the SDK's own models drop fields that they do not know."""


class Session:
    """An MCP session with a handshake, which takes and returns plain JSON. Usable from any task."""

    def __init__(self, read: Any, write: Any) -> None:
        self._session = ClientSession(read, write)

    async def __aenter__(self) -> Self:
        await self._session.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.__aexit__(kind, error, trace)

    async def initialize(self) -> JsonObject:
        """The server's answer to the handshake."""
        result = await self._session.initialize()
        return result.model_dump(by_alias=True, mode="json", exclude_none=True)

    async def request(self, method: str, params: JsonObject, on_progress: OnProgress | None) -> JsonObject:
        """Send one request and return its result. Cancellation cancels the request on the server too.

        Raises SdkError for an error reply, ValidationError for a result that is not MCP, and one of
        CLOSED_STREAM_ERRORS after the session has ended.
        """
        session = cast("Any", self._session)
        if IS_1X:
            params = with_trace_context(params)
        request = _REQUESTS[method].model_validate({"method": method, "params": params})
        if not IS_1X:
            return (await session.send_request(request, _Raw, progress_callback=on_progress)).root
        # 1.x does not tell the server that a request was cancelled, and has no public way to learn its id.
        request_id = session._request_id
        try:
            wrapped = _any_types.ClientRequest(request)
            return (await session.send_request(wrapped, _Raw, progress_callback=on_progress)).root
        except anyio.get_cancelled_exc_class():
            await self._cancel(request_id)
            raise

    async def _cancel(self, request_id: int) -> None:
        message = {"method": "notifications/cancelled", "params": {"requestId": request_id}}
        notification = _any_types.ClientNotification(types.CancelledNotification.model_validate(message))
        with anyio.move_on_after(CANCEL_SECONDS, shield=True), suppress(*CLOSED_STREAM_ERRORS):
            await cast("Any", self._session).send_notification(notification)


def with_trace_context(params: JsonObject) -> JsonObject:
    """The parameters with the trace context of the program's current span, if it has one.

    2.x does this by itself, by OpenTelemetry too.
    """
    if "opentelemetry.trace" not in sys.modules:
        return params  # no span can be current
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier)
    return {**params, "_meta": {**(as_object(params.get("_meta")) or {}), **carrier}} if carrier else params


def json_rpc_error(error: Exception) -> tuple[int, str, object]:
    """Code, message and data of an SdkError."""
    details = cast("Any", error).error
    return details.code, details.message, details.data


class ErrorResponse:
    """An HTTP error: its status, the JSON-RPC error in its body (empty if none), and the body's text."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        try:
            message = as_object(json.loads(body)) or {}
        except (ValueError, RecursionError):
            message = {}
        self.error: JsonObject = as_object(message.get("error")) or {}
        self.text: str = body[:500].decode("utf-8", "replace").strip()


@asynccontextmanager
async def http_session(
    url: str,
    headers: dict[str, str],
    *,
    may_send: Callable[[], bool],
    on_error_response: Callable[[ErrorResponse], None],
    on_truncation: Callable[[], None],
) -> AsyncGenerator[Session]:
    """A session over streamable HTTP; on exit it is ended with a DELETE.

    Once `may_send` returns False, nothing more is sent, not even that. `on_error_response` is called for a
    POST that failed, `on_truncation` when the stream of a reply broke off. Errors of the network are raised
    alone or in a group (see `cause_of`).
    """

    client = _SessionClient(may_send, on_error_response, on_truncation, **_options(headers))
    async with client:
        transport = cast("Any", streamable_http_client(url, http_client=client, **NO_EVENT_LIMIT))
        with ExitStack() as ends:
            async with transport as (read, write, *_):
                # The transport ends later than its session, and the SDK logs a traceback for an event that
                # comes between, because the session has closed both streams. With further ends they stay
                # open; such an event then waits, and is cancelled with the transport.
                for stream in (read, write):
                    ends.callback(stream.clone().close)
                async with Session(read, write) as session:
                    yield session


def http_client(headers: dict[str, str], *, follow_redirects: bool = True) -> httpx.AsyncClient:
    """A client for plain HTTP, as sessions use it."""
    return httpx.AsyncClient(**_options(headers, follow_redirects=follow_redirects))


def _options(headers: dict[str, str], *, follow_redirects: bool = True) -> dict[str, Any]:
    # The SDK's own client gives up a call after 300 s of silence; httpx's default is 5 s.
    return {
        "headers": {**UNCOMPRESSED, **LARGE_EVENTS, **headers},
        "mounts": DIRECT,
        "timeout": httpx.Timeout(None, connect=CONNECT_SECONDS),
        "limits": httpx.Limits(max_connections=None),
        "verify": _certificates(),
        "follow_redirects": follow_redirects,
        "event_hooks": {"response": [_bound_response]},
    }


class _SessionClient(httpx.AsyncClient):
    """The HTTP client of a session. See `http_session` for its arguments.

    It answers requests itself, with an empty body, once `may_send` returns False, and also notifications and
    the end of a session if they fail.
    """

    # Not with an error: of these the SDK logs a warning, or a traceback of sixty lines. That a connection is
    # broken, the requests that wait for an answer find out.

    def __init__(
        self,
        may_send: Callable[[], bool],
        on_error_response: Callable[[ErrorResponse], None],
        on_truncation: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._may_send = may_send
        self._on_error_response = on_error_response
        self._on_truncation = on_truncation

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        if self._may_send():
            try:
                response = await super().send(request, **options)
            except httpx.HTTPError:
                if _is_answered(request):
                    raise
            else:
                is_post = request.method == "POST"
                if not response.is_error:
                    if is_post and response.headers.get("content-type", "").startswith("text/event-stream"):
                        stream = cast("httpx.AsyncByteStream", response.stream)
                        response.stream = _WatchedStream(stream, self._on_truncation)
                    return response
                if _is_answered(request):
                    if is_post:
                        error = ErrorResponse(response.status_code, await response.aread())
                        self._on_error_response(error)
                    return response
                await response.aclose()
        status = {"GET": 405, "POST": 202}.get(request.method, 200)
        return httpx.Response(status, request=request)


def _is_answered(request: httpx.Request) -> bool:
    """Whether something waits for what the server answers."""
    if request.method == "POST":
        message = as_object(json.loads(request.content)) or {}
        return "method" in message and "id" in message
    return request.method != "DELETE"


async def _bound_response(response: httpx.Response) -> None:
    """Let reading the body of a response fail once a message in it is too long.

    Raises httpx.RemoteProtocolError for a compressed response.
    """
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        await response.aclose()
        raise httpx.RemoteProtocolError("the server's response is compressed, which it was asked not to be")
    is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
    response.stream = _BoundedStream(cast("httpx.AsyncByteStream", response.stream), has_events=is_stream)


class _BoundedStream(httpx.AsyncByteStream):
    """A body that fails after MAX_MESSAGE_BYTES. `has_events`: so many without the end of an event."""

    def __init__(self, stream: httpx.AsyncByteStream, *, has_events: bool) -> None:
        self._stream = stream
        self._has_events = has_events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size_bytes, last = 0, b""
        async for chunk in self._stream:
            size_bytes += len(chunk)
            if self._has_events:
                # An empty line; the end of a chunk may be inside of one.
                joined = last + chunk
                if (end := max(map(joined.rfind, _EVENT_ENDS))) >= 0:
                    size_bytes = len(joined) - end
                last = joined[-2:]
            if size_bytes > MAX_MESSAGE_BYTES:
                raise httpx.RemoteProtocolError(f"a message has more than {MAX_MESSAGE_BYTES >> 20} MiB")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


_EVENT_ENDS = (b"\n\n", b"\r\r", b"\n\r\n")


class _WatchedStream(httpx.AsyncByteStream):
    """The event stream of a reply, which reports when it ends without one."""

    # In 1.x a stream that was cut leaves its call waiting for ever. The SDK closes the stream once it has the
    # reply, so iteration only ever reaches its end, or fails, without one.

    def __init__(self, stream: httpx.AsyncByteStream, on_truncation: Callable[[], None]) -> None:
        self._stream = stream
        self._on_truncation = on_truncation
        self._chunks: AsyncIterator[bytes] | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._chunks = aiter(self._stream)
        try:
            async for chunk in self._chunks:
                yield chunk
        except httpx.HTTPError:
            self._on_truncation()
            raise
        self._on_truncation()

    async def aclose(self) -> None:
        try:
            # A connection whose response was not read to its end cannot be used again, and the next call
            # would open another. Servers send the end together with the reply.
            with anyio.move_on_after(END_SECONDS), suppress(httpx.HTTPError, RuntimeError):
                await self._read_rest()
        finally:
            await self._stream.aclose()

    async def _read_rest(self) -> None:
        if self._chunks is not None:
            async for _ in self._chunks:
                pass


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The system's certificates, read once: that takes longer than everything else about a client."""
    return httpx.create_ssl_context()


def cause_of(error: BaseException) -> BaseException:
    """The decisive exception of a group: one of the network or the SDK before any other."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [cause_of(inner) for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions]
    known = [cause for cause in causes if isinstance(cause, (SdkError, httpx.HTTPError))]
    return (known or causes)[0]
