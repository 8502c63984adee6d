"""The MCP SDK, 1.x or 2.x: the one file that knows which.

Requests and results are the wire's own JSON on either side of it, so nothing else here meets the SDK's
models, which differ between the two. The HTTP client is ours: the SDK's gives up a call after 300 s of
silence, httpx's own default is 5 s, and in 1.x a stream that was cut leaves its call waiting for ever.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import anyio
import mcp.shared.exceptions
from mcp import ClientSession, types
from mcp.client.streamable_http import streamable_http_client
from pydantic import RootModel, ValidationError

from decathlon_client.values import JsonObject, OnProgress, as_object

if TYPE_CHECKING:
    import httpx2 as httpx

CONNECT_SECONDS = 30.0
CANCEL_SECONDS = 5.0
CLOSED = (anyio.ClosedResourceError, anyio.BrokenResourceError)
"""What a stream of the SDK raises whose other end has gone."""

_exceptions: Any = mcp.shared.exceptions
_any_types: Any = types
IS_1X = not hasattr(_exceptions, "MCPError")
LIMITS_EVENTS = "max_sse_event_size" in inspect.signature(streamable_http_client).parameters
"""2.0 and 1.x do not."""
SdkError: type[Exception] = _exceptions.McpError if IS_1X else _exceptions.MCPError

if not TYPE_CHECKING:
    httpx = importlib.import_module("httpx" if IS_1X else "httpx2")

_REQUESTS: dict[str, Any] = {"tools/list": types.ListToolsRequest, "tools/call": types.CallToolRequest}

__all__ = [
    "CLOSED",
    "IS_1X",
    "Refusal",
    "SdkError",
    "Session",
    "ValidationError",
    "cause_of",
    "http_session",
    "json_rpc",
]


class _Raw(RootModel[dict[str, Any]]):
    """A result as it came; the SDK's own models would drop what they do not know."""


class Session:
    """An MCP session with a handshake: a method and its params in, the result out. Usable from any task."""

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
        """Raises SdkError for an error that came back, ValidationError for a result that is not MCP's, one of
        CLOSED where there is nobody to ask any more.

        Being cancelled cancels the request.
        """
        session = cast("Any", self._session)
        request = _REQUESTS[method].model_validate({"method": method, "params": params})
        if not IS_1X:
            return (await session.send_request(request, _Raw, progress_callback=on_progress)).root
        number = session._request_id
        try:
            wrapped = _any_types.ClientRequest(request)
            return (await session.send_request(wrapped, _Raw, progress_callback=on_progress)).root
        except anyio.get_cancelled_exc_class():
            await self._cancel(number)
            raise

    async def _cancel(self, number: int) -> None:
        """Tell the server, as 2.x does by itself."""
        told = {"method": "notifications/cancelled", "params": {"requestId": number}}
        notification = _any_types.ClientNotification(types.CancelledNotification.model_validate(told))
        with anyio.move_on_after(CANCEL_SECONDS, shield=True), suppress(*CLOSED):
            await cast("Any", self._session).send_notification(notification)


def json_rpc(error: Exception) -> tuple[int, str, object]:
    """Code, message and data of an SdkError."""
    told = cast("Any", error).error
    return told.code, told.message, told.data


class Refusal:
    """A POST answered with an HTTP error: its status, and the JSON-RPC error in it if there was one."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        try:
            told = as_object(json.loads(body)) or {}
        except ValueError:
            told = {}
        self.error: JsonObject = as_object(told.get("error")) or {}
        self.text: str = body[:500].decode("utf-8", "replace").strip()


@asynccontextmanager
async def http_session(
    url: str, headers: dict[str, str], on_refusal: Callable[[Refusal], None], on_cut: Callable[[], None]
) -> AsyncGenerator[Session]:
    """A session over streamable HTTP; on exit it is ended with a DELETE.

    `on_cut` is called when the stream of a reply broke off. What the network does comes out as an exception,
    alone or in a group (see `cause_of`).
    """

    async def watch(response: httpx.Response) -> None:
        if response.request.method != "POST":
            return
        if response.status_code >= 400:
            on_refusal(Refusal(response.status_code, await response.aread()))
        elif response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _Watched(cast("httpx.AsyncByteStream", response.stream), on_cut)

    hook: Callable[[httpx.Response], Awaitable[None]] = watch
    more: dict[str, Any] = {"max_sse_event_size": None} if LIMITS_EVENTS else {}
    async with httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None),
        verify=_certificates(),
        follow_redirects=True,
        event_hooks={"response": [hook]},
    ) as client:
        opened = cast("Any", streamable_http_client(url, http_client=client, **more))
        async with opened as (read, write, *_), Session(read, write) as session:
            yield session


class _Watched(httpx.AsyncByteStream):
    """The stream of a reply. Whoever gets the reply closes it; its own end comes only where there is none."""

    def __init__(self, stream: httpx.AsyncByteStream, on_cut: Callable[[], None]) -> None:
        self._stream = stream
        self._on_cut = on_cut

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._stream:
                yield chunk
        except httpx.HTTPError:
            self._on_cut()
            raise
        self._on_cut()

    async def aclose(self) -> None:
        await self._stream.aclose()


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: it costs more than everything else about a client."""
    return httpx.create_ssl_context()


def cause_of(error: BaseException) -> BaseException:
    """The exception that matters in a group of them: one of the network's or the SDK's before any other."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [cause_of(inner) for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions]
    known = [cause for cause in causes if isinstance(cause, (SdkError, httpx.HTTPError))]
    return (known or causes)[0]
