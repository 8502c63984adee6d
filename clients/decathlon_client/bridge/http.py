"""The HTTP client below the SDK's transport, which outlives a connection, a session and a server."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final

import anyio
import httpx2
import mcp_types as types
from mcp.client.streamable_http import MCP_SESSION_ID
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER

from decathlon_client.errors import ConnectionLostError
from decathlon_client.requests import RESEND_SECONDS, ResendPolicy, Resends
from decathlon_client.sdk import CONNECT_SECONDS, LARGE_EVENTS, UNCOMPRESSED, bound_response
from decathlon_client.session import UNAVAILABLE
from decathlon_client.values import DIRECT, as_object, authorization, label_headers

DELETE_SECONDS = 5.0
"""For the DELETE of a session at the end: the server ends it by itself, and the user waits for the exit."""
RECONNECT_SECONDS = 2.0
"""Delay before the session's GET stream is opened again."""
ERROR_TEXT_CHARACTERS = 500
NO_SERVER: Final = -32000
CANCELLED = "notifications/cancelled"
BODY_HEADERS = frozenset({"content-encoding", "content-length", "transfer-encoding"})
"""Headers that describe a body as it was sent, and not as it is passed on."""
EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
EVENT_STREAM = {"content-type": "text/event-stream"}
INITIALIZED = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
TOOLS_CHANGED = b'{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}'


class _Pending:
    """A request without an answer: its JSON-RPC id as JSON, and whether the client cancels it.

    Clients use an id again while its request is in flight, so that the id does not name a request.
    """

    def __init__(self, number: str, method: str) -> None:
        self.number = number
        self.method = method
        self.cancelled = anyio.Event()


class BridgeHttpClient(httpx2.AsyncClient):
    """The HTTP client of the SDK's transport: waits for a server that is gone, renews a lost session.

    A request whose connection is lost is sent again until the server answers, or for `RESEND_SECONDS`. Before
    the first answer none is, so that a wrong address is reported at once.
    """

    # The SDK's transport (mcp 2.3) cancels all its requests when the HTTP client raises in one of them, and
    # gives up a session's GET stream when it has failed twice. A server ends a session whose GET stream does
    # not come back, and a task's episode with it. So nothing is raised here, and one GET stream never ends.

    def __init__(self, url: str, token: str, labels: Mapping[str, str]) -> None:
        super().__init__(
            event_hooks={"response": [bound_response]},
            headers={**UNCOMPRESSED, **LARGE_EVENTS, **authorization(token), **label_headers(labels)},
            mounts=DIRECT,
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None),
        )
        self._url = url
        self._initialize: httpx2.Request | None = None
        self._session_id: str | None = None
        self._renewing = anyio.Lock()
        self._renewed = anyio.Event()
        self._policy = ResendPolicy(RESEND_SECONDS)
        self._was_reached = False
        self._pending: set[_Pending] = set()
        """Requests that may have to be sent again."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request. What fails, also in the network, is answered with a JSON-RPC error."""
        if request.method == "GET":
            return httpx2.Response(
                200, request=request, headers=EVENT_STREAM, content=self._events(request, options)
            )
        if request.method == "DELETE":
            request.extensions["timeout"] = httpx2.Timeout(DELETE_SECONDS).as_dict()
        message = _message(request)
        method = str(message.get("method", ""))
        if method == CANCELLED:
            params = as_object(message.get("params")) or {}
            number = json.dumps(params.get("requestId"))
            for pending in self._pending:
                if pending.number == number:
                    pending.cancelled.set()
        if not method or message.get("id") is None:
            try:
                return await self._try(request, options)
            except _LostError as error:
                return _failure(request, error.message)
        pending = _Pending(json.dumps(message["id"]), method)
        self._pending.add(pending)
        try:
            response = await self._send_until_answered(request, options, pending)
        except BaseException:
            self._pending.discard(pending)
            raise
        if not _has_type(response, "text/event-stream"):
            self._pending.discard(pending)
            return response
        headers = {name: value for name, value in response.headers.items() if name not in BODY_HEADERS}
        events = self._reply_events(request, options, response, pending)
        return httpx2.Response(response.status_code, request=request, headers=headers, content=events)

    async def notify(self, notification: types.JSONRPCNotification, headers: Mapping[str, str]) -> None:
        """Send a notification that the SDK's transport would not send."""
        message = notification.model_dump(by_alias=True, mode="json", exclude_unset=True)
        accept = {"Accept": "application/json, text/event-stream"}
        response = await self.post(self._url, json=message, headers={**accept, **headers})
        if response.is_error:
            log(f"{notification.method} was refused: {response.text[:ERROR_TEXT_CHARACTERS]}")

    async def _send_until_answered(
        self, request: httpx2.Request, options: dict[str, Any], pending: _Pending
    ) -> httpx2.Response:
        """Send a request, again after each loss of the connection."""
        resends = Resends(self._policy)
        try:
            while True:
                sent_at = anyio.current_time()
                try:
                    return await self._try(request, options)
                except _LostError as loss:
                    # `initialize` at a task's address starts an episode: carried out twice, it starts two.
                    starts_episode = pending.method == "initialize" and "/tasks/" in self._url
                    if not self._was_reached or (starts_episode and not loss.was_refused):
                        raise
                    await resends.pause(loss, pending.cancelled, sent_at)
        except ConnectionLostError as loss:
            return _failure(request, loss.message)

    async def _try(self, request: httpx2.Request, options: dict[str, Any]) -> httpx2.Response:
        """Send a request once. Raises _LostError if the server was not reached, or broke off."""
        try:
            response = await self._send_in_session(request, options)
            if response.status_code == 404 and MCP_SESSION_ID in request.headers and request.method == "POST":
                await response.aclose()
                if not await self._renew_session(request):
                    return _failure(
                        request, "the server has ended this session and its episode; start a new one"
                    )
                # The server has not looked at the request, so it is not carried out twice.
                response = await self._send_in_session(request, options)
            if response.is_error or not _has_type(response, "text/event-stream"):
                await response.aread()
        except httpx2.ConnectError as error:
            raise _LostError(f"no server answers at {self._url}: {_text(error)}", was_refused=True) from None
        except httpx2.HTTPError as error:
            message = f"lost {self._url}: {_text(error)}; it is not known whether the request was carried out"
            raise _LostError(message, was_refused=False) from None
        if response.is_error and not _has_type(response, "application/json"):
            text = response.text[:ERROR_TEXT_CHARACTERS].strip()
            if response.status_code in UNAVAILABLE:
                raise _LostError(f"HTTP {response.status_code}: {text}", was_refused=False)
            return _failure(request, f"HTTP {response.status_code}: {text}")
        self._was_reached = True
        return response

    async def _reply_events(
        self,
        request: httpx2.Request,
        options: dict[str, Any],
        response: httpx2.Response,
        pending: _Pending,
    ) -> AsyncGenerator[bytes]:
        """The events of a reply's stream; after a loss, the events of the request that is sent again."""
        # The SDK closes the stream once it has the reply, so that only a broken stream, or the stream of a
        # cancelled request, is read to its end.
        resends, sent_at = Resends(self._policy), anyio.current_time()
        try:
            while True:
                try:
                    async for events in _whole_events(response):
                        yield events
                except httpx2.HTTPError:
                    pass
                finally:
                    await response.aclose()
                if pending.cancelled.is_set():
                    return
                loss = ConnectionLostError(f"lost {self._url} in the middle of an answer")
                try:
                    await resends.pause(loss, pending.cancelled, sent_at)
                    sent_at = anyio.current_time()
                    response = await self._send_until_answered(request, options, pending)
                except ConnectionLostError:
                    response = _failure(request, loss.message)
                if not _has_type(response, "text/event-stream"):
                    yield b"data: " + _reply_of(response, request) + b"\n\n"
                    return
        finally:
            self._pending.discard(pending)

    async def _send_in_session(self, request: httpx2.Request, options: dict[str, Any]) -> httpx2.Response:
        # The transport only knows the id of the first session.
        if MCP_SESSION_ID in request.headers and self._session_id is not None:
            request.headers[MCP_SESSION_ID] = self._session_id
        response = await super().send(request, **options)
        if MCP_SESSION_ID not in request.headers and MCP_SESSION_ID in response.headers:
            self._initialize, self._session_id = request, response.headers[MCP_SESSION_ID]
        return response

    async def _renew_session(self, refused: httpx2.Request) -> bool:
        """Open another session with the same `initialize`; False if there can be none."""
        async with self._renewing:
            if self._session_id != refused.headers[MCP_SESSION_ID]:
                return True  # another request has renewed it
            # At a task's address the session was an episode: another session would be another attempt, and
            # nobody would know.
            if "/tasks/" in self._url or self._initialize is None:
                return False
            response = await super().send(self._initialize)
            if MCP_SESSION_ID not in response.headers:
                return False
            self._session_id = response.headers[MCP_SESSION_ID]
            copied = ("accept", "content-type", MCP_PROTOCOL_VERSION_HEADER)
            headers = {name: refused.headers[name] for name in copied if name in refused.headers}
            headers[MCP_SESSION_ID] = self._session_id
            await super().send(self.build_request("POST", self._url, content=INITIALIZED, headers=headers))
            log("the server had forgotten the session; a new one is open")
            self._renewed.set()
            self._renewed = anyio.Event()
            return True

    async def _events(self, request: httpx2.Request, options: dict[str, Any]) -> AsyncIterator[bytes]:
        """The session's GET stream, opened again whenever it ends."""
        while True:
            renewed, delay = self._renewed, RECONNECT_SECONDS
            with suppress(httpx2.HTTPError):
                response = await self._send_in_session(request, options)
                try:
                    if response.is_success:
                        async for chunk in response.aiter_bytes():
                            yield chunk
                    elif response.is_client_error:
                        # Only a request renews a session: listening alone must not keep one alive.
                        delay = None
                finally:
                    await response.aclose()
            yield b"\n\n"  # the end of an event that was cut off
            with anyio.move_on_after(delay):
                await renewed.wait()
            if renewed.is_set():
                yield b"data: " + TOOLS_CHANGED + b"\n\n"


class _LostError(ConnectionLostError):
    """A request has no answer. `was_refused`: the server cannot have got it."""

    def __init__(self, message: str, *, was_refused: bool) -> None:
        super().__init__(message)
        self.was_refused = was_refused


async def _whole_events(response: httpx2.Response) -> AsyncIterator[bytes]:
    """The bytes of an event stream in whole events, without the beginning of a cut event."""
    pending = bytearray()
    async for chunk in response.aiter_bytes():
        # Only the new bytes are searched: an event may be as long as the longest reply.
        start = max(0, len(pending) - 3)
        pending += chunk
        ends = [pending.rfind(mark, start) + len(mark) for mark in EVENT_ENDS if mark in pending[start:]]
        if ends:
            yield bytes(pending[: max(ends)])
            del pending[: max(ends)]


def _message(request: httpx2.Request) -> dict[str, Any]:
    """The JSON-RPC message in a request; empty if there is none."""
    if request.method != "POST":
        return {}
    try:
        return as_object(json.loads(request.content)) or {}
    except (ValueError, RecursionError):
        return {}


def _reply_of(response: httpx2.Response, request: httpx2.Request) -> bytes:
    """The message in a response's body, with the request's id if it has none, on one line."""
    try:
        message = as_object(response.json()) or {}
    except ValueError:
        message = {"jsonrpc": "2.0", "error": {"code": NO_SERVER, "message": "the answer is not JSON"}}
    if message.get("id") is None:
        message = {**message, "id": _message(request).get("id")}
    return json.dumps(message).encode()


def _has_type(response: httpx2.Response, content_type: str) -> bool:
    return response.headers.get("content-type", "").startswith(content_type)


def _failure(request: httpx2.Request, message: str) -> httpx2.Response:
    """A response that the SDK's transport relays as an error under the request's id."""
    # The transport drops errors of notifications: then the log is the only place to see them.
    log(message)
    error = {"code": NO_SERVER, "message": message}
    return httpx2.Response(502, request=request, json={"jsonrpc": "2.0", "id": None, "error": error})


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def log(text: str) -> None:
    """Write a line to stderr, which programs show as the log of the bridge."""
    sys.stderr.write(f"decathlon-mcp: {text}\n")
    sys.stderr.flush()
