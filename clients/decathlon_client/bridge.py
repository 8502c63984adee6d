"""The bridge, `decathlon-mcp stdio --url URL`: relays stdin and stdout to a server over streamable HTTP.

The SDK's two transports do the work; messages pass between them unchanged, except that each `tools/call`
without an operation id gets one. This module adds the HTTP headers that an SDK session would add, sends a
request again whose connection was lost, opens a forgotten lobby session again, and answers for a server that
does not.

Requires `mcp` 2.3 or later and nothing of the server: it runs on any system, without sandboxes.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote, urlsplit

import anyio
import httpx2
import mcp_types as types
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp.server.stdio import stdio_server
from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    NAME_BEARING_METHODS,
    encode_header_value,
    find_invalid_x_mcp_header,
    mcp_param_headers,
    x_mcp_header_map,
)
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.shared.message import ClientMessageMetadata, SessionMessage

from decathlon_client.background import background_tasks
from decathlon_client.errors import ConnectionLostError
from decathlon_client.resending import RESEND_SECONDS, ResendPolicy, Resends, with_operation
from decathlon_client.stdin import StdinPump, stop_on_signal
from decathlon_client.values import as_object, as_objects

CONNECT_SECONDS = 30.0
LIST_SECONDS = 120.0
"""How long the call of a tool that was not listed waits for the list, which has the names of its headers."""
DELETE_SECONDS = 5.0
RECONNECT_SECONDS = 2.0
"""Delay before the session's GET stream is opened again."""
ERROR_TEXT_CHARACTERS = 500
NO_SERVER: Final = -32000
CANCELLED = "notifications/cancelled"
LOBBY_CALL = "call_tool"
"""The lobby's tool that calls one of an episode."""
EPISODE_KEY = "decathlon/episode"
"""Key of the episode in the `_meta` of a notification that cancels such a call."""
UNAVAILABLE = frozenset({502, 503, 504})
"""Statuses with which a proxy answers for a server that is gone."""
BODY_HEADERS = frozenset({"content-encoding", "content-length", "transfer-encoding"})
"""Headers that describe a body as it was sent, and not as it is passed on."""
EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
EVENT_STREAM = {"content-type": "text/event-stream"}
ENVELOPE_PREFIX = "io.modelcontextprotocol/"
MAX_NOT_LISTED = 1_000
"""Names of tools that are remembered as not listed."""
INITIALIZED = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
TOOLS_CHANGED = b'{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}'


async def bridge(url: str, task: str | None) -> int:
    """Relay until stdin ends or SIGTERM or SIGINT arrives, then end the session with a DELETE.

    `url` is a server's root or the address of a lobby, task or episode. Returns the exit status.
    """
    try:
        endpoint = address(url, task)
    except ValueError as error:
        _log(str(error))
        return 1
    _log(f"relaying stdin and stdout to {endpoint}")
    source, sink = socket.socketpair()
    with source, sink, source.makefile("r", encoding="utf-8", errors="replace") as stdin:
        async with stdio_server(anyio.wrap_file(stdin)) as (from_client, to_client), from_client, to_client:
            # The pump ends before stdio_server does, whose reader would otherwise block in its thread.
            with StdinPump(0, sink) as pump:
                async with (
                    BridgeHttpClient(endpoint) as http,
                    # The default, 1 MiB for an event, would refuse large replies.
                    streamable_http_client(endpoint, http_client=http, max_sse_event_size=None) as server,
                    background_tasks() as tasks,
                ):
                    relay = Relay((from_client, to_client), server, http.cancel_call)
                    tasks.start_soon(stop_on_signal, pump)
                    tasks.start_soon(relay.run_to_client)
                    await relay.run_to_server()
    return 0


def main(arguments: Sequence[str]) -> int:
    """`decathlon-mcp stdio` where only the client is installed. Returns the exit status."""
    parser = argparse.ArgumentParser("decathlon-mcp stdio")
    parser.add_argument("--url", required=True)
    parser.add_argument("--task")
    options = parser.parse_args(arguments)
    return anyio.run(bridge, options.url, options.task)


def address(url: str, task: str | None = None) -> str:
    """The MCP address for a server's URL: its lobby or, with a task, that task's; other addresses unchanged.

    Raises ValueError if `url` is not an HTTP URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"--url: not the address of a server, as http://127.0.0.1:8765 is one: {url!r}")
    if parts.path.startswith(("/tasks/", "/episodes/")) and task is None:
        return url
    root = url.rstrip("/").removesuffix("/mcp")
    return f"{root}/mcp" if task is None else f"{root}/tasks/{quote(task, safe='')}/mcp"


class Relay:
    """Passes messages between two transports of the SDK, and adds the headers that HTTP requires."""

    def __init__(
        self,
        client: Any,
        server: Any,
        cancel_call: Callable[[types.JSONRPCRequest], Coroutine[Any, Any, None]],
    ) -> None:
        self._from_client, self._to_client = client
        self._from_server, self._to_server = server
        self._cancel_call = cancel_call
        self._version: str | None = None
        self._initialize_id: types.RequestId | None = None
        self._initialize_answered = anyio.Event()
        self._header_maps: dict[str, dict[tuple[str, ...], str]] = {}
        self._not_listed: set[str] = set()
        self._own_lists: dict[types.RequestId, anyio.Event] = {}
        """The bridge's own requests for the list of tools."""
        self._calls: dict[types.RequestId, types.JSONRPCRequest] = {}
        """Calls without a session that are not answered yet."""

    async def run_to_server(self) -> None:
        """Relay the client's messages until stdin ends."""
        async with background_tasks() as tasks:
            async for item in self._from_client:
                if isinstance(item, Exception):
                    await self._to_client.send(_parse_error())
                    continue
                message = item.message
                if isinstance(message, types.JSONRPCRequest) and message.method == "tools/call":
                    if message.params:
                        message.params = with_operation(message.params)
                    if _version_of(message) is not None:
                        self._calls[message.id] = message
                    if self._needs_list(message):
                        tasks.start_soon(self._send_after_list, item)
                        continue
                await self._send(item)
                if (cancelled := self._cancelled_call(message)) is not None:
                    # Without sessions, cancelling is losing the connection, after which the bridge could come
                    # back for the answer.
                    tasks.start_soon(self._cancel_call, cancelled)

    def _cancelled_call(self, message: types.JSONRPCMessage) -> types.JSONRPCRequest | None:
        """The call without a session that a message cancels."""
        if not isinstance(message, types.JSONRPCNotification) or message.method != CANCELLED:
            return None
        number = cancelled_request_id_from_params(message.params)
        return None if number is None else self._calls.pop(number, None)

    async def _send(self, item: SessionMessage) -> None:
        message = item.message
        # The SDK's HTTP client raises for other values, which would end the bridge; without the header the
        # server refuses the request.
        headers = {name: value for name, value in self._headers(message).items() if _is_header_value(value)}
        item.metadata = ClientMessageMetadata(headers=headers)
        if not (isinstance(message, types.JSONRPCRequest) and message.method == "initialize"):
            await self._to_server.send(item)
            return
        # Whatever follows belongs to the session whose id is in the answer.
        self._initialize_id, self._initialize_answered = message.id, anyio.Event()
        await self._to_server.send(item)
        await self._initialize_answered.wait()

    def _needs_list(self, call: types.JSONRPCRequest) -> bool:
        """Whether the headers of a call depend on the schema of a tool that has not been listed."""
        name = (call.params or {}).get("name")
        has_arguments = bool((call.params or {}).get("arguments"))
        is_known = not isinstance(name, str) or name in self._header_maps or name in self._not_listed
        return _version_of(call) is not None and has_arguments and not is_known

    async def _send_after_list(self, call: SessionMessage) -> None:
        """List the tools with the envelope of a call, then send the call."""
        message = call.message
        assert isinstance(message, types.JSONRPCRequest)
        params = message.params or {}
        meta = as_object(params.get("_meta")) or {}
        envelope = {key: value for key, value in meta.items() if key.startswith(ENVELOPE_PREFIX)}
        number = f"decathlon-bridge-{secrets.token_hex(8)}"
        answered = self._own_lists[number] = anyio.Event()
        try:
            request = types.JSONRPCRequest(
                jsonrpc="2.0", id=number, method="tools/list", params={"_meta": envelope}
            )
            await self._send(SessionMessage(request))
            with anyio.move_on_after(LIST_SECONDS):
                await answered.wait()
        finally:
            del self._own_lists[number]
        if params["name"] not in self._header_maps and len(self._not_listed) < MAX_NOT_LISTED:
            self._not_listed.add(params["name"])
        await self._send(call)

    async def run_to_client(self) -> None:
        """Relay the server's messages until cancelled."""
        async for item in self._from_server:
            if isinstance(item, Exception):
                _log(f"unreadable message from the server: {item}")
                continue
            self._note(item.message)
            if isinstance(item.message, (types.JSONRPCResponse, types.JSONRPCError)):
                if item.message.id is not None:
                    self._calls.pop(item.message.id, None)
                answered = self._own_lists.get(str(item.message.id))
                if answered is not None:
                    answered.set()
                    continue
            await self._to_client.send(item)

    def _note(self, message: types.JSONRPCMessage) -> None:
        """Remember what later headers depend on: the negotiated version and the tools' header annotations."""
        if isinstance(message, types.JSONRPCResponse):
            for tool in as_objects(message.result.get("tools")):
                schema = tool.get("inputSchema")
                if find_invalid_x_mcp_header(schema) is None:
                    self._header_maps[str(tool.get("name"))] = x_mcp_header_map(schema)
        if isinstance(message, (types.JSONRPCResponse, types.JSONRPCError)) and (
            message.id == self._initialize_id
        ):
            if isinstance(message, types.JSONRPCResponse):
                self._version = str(message.result.get("protocolVersion"))
            self._initialize_answered.set()

    def _headers(self, message: types.JSONRPCMessage) -> dict[str, str]:
        """The headers of one message, as an SDK session sets them in the era that the message belongs to."""
        if not isinstance(message, (types.JSONRPCRequest, types.JSONRPCNotification)):
            return {}
        params = message.params or {}
        version = _version_of(message)
        if version is None:
            return {MCP_PROTOCOL_VERSION_HEADER: self._version} if self._version else {}
        headers = {MCP_PROTOCOL_VERSION_HEADER: version, MCP_METHOD_HEADER: message.method}
        name = params.get(NAME_BEARING_METHODS.get(message.method, ""))
        if isinstance(name, str):
            headers[MCP_NAME_HEADER] = encode_header_value(name)
        if message.method == "tools/call":
            header_map = self._header_maps.get(str(name), {})
            headers |= mcp_param_headers(header_map, as_object(params.get("arguments")) or {})
        return headers


def _version_of(message: types.JSONRPCRequest | types.JSONRPCNotification) -> str | None:
    """The protocol revision that a message without a session names; None for one of a session."""
    meta = as_object((message.params or {}).get("_meta")) or {}
    version = meta.get(types.PROTOCOL_VERSION_META_KEY)
    return version if isinstance(version, str) else None


class BridgeHttpClient(httpx2.AsyncClient):
    """The HTTP client of the SDK's transport: waits for a server that is gone, renews a lost session.

    A request whose connection is lost is sent again until the server answers, or for `resend_seconds`. Before
    the first answer none is, so that a wrong address is reported at once.
    """

    # The SDK's transport (mcp 2.3) cancels all its requests when the HTTP client raises in one of them, and
    # gives up a session's GET stream when it has failed twice. A server ends a session whose GET stream does
    # not come back, and a task's episode with it. So nothing is raised here, and one GET stream never ends.

    def __init__(self, url: str, *, resend_seconds: float = RESEND_SECONDS) -> None:
        token = os.environ.get("DECATHLON_TOKEN", "")
        if token.startswith("${"):  # a template variable that the program had no value for
            token = ""
        super().__init__(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None),
        )
        self._url = url
        self._initialize: httpx2.Request | None = None
        self._session_id: str | None = None
        self._renewing = anyio.Lock()
        self._renewed = anyio.Event()
        self._policy = ResendPolicy(resend_seconds)
        self._was_reached = False
        self._pending: dict[str, anyio.Event] = {}
        """Requests that may have to be sent again, by their JSON-RPC id; set when the client cancels one."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request. What fails, also in the network, is answered with a JSON-RPC error."""
        if request.method == "GET":
            return httpx2.Response(
                200, request=request, headers=EVENT_STREAM, content=self._events(request, options)
            )
        if request.method == "DELETE":
            request.extensions["timeout"] = httpx2.Timeout(DELETE_SECONDS).as_dict()
        method, number = _method_and_id(request)
        if method == CANCELLED and (cancelled := self._pending.get(_cancelled_id(request))) is not None:
            cancelled.set()
        if number is None:
            try:
                return await self._try(request, options)
            except _LostError as error:
                return _failure(request, error.message)
        cancelled = self._pending[number] = anyio.Event()
        try:
            response = await self._send_until_answered(request, options, method, cancelled)
        except BaseException:
            del self._pending[number]
            raise
        if not _has_type(response, "text/event-stream"):
            del self._pending[number]
            return response
        headers = {name: value for name, value in response.headers.items() if name not in BODY_HEADERS}
        events = self._reply_events(request, options, response, method, number)
        return httpx2.Response(response.status_code, request=request, headers=headers, content=events)

    async def cancel_call(self, call: types.JSONRPCRequest) -> None:
        """Tell the server that nobody comes back for the answer to a call without a session."""
        params = call.params or {}
        meta = dict(as_object(params.get("_meta")) or {})
        arguments = as_object(params.get("arguments")) or {}
        if params.get("name") == LOBBY_CALL:
            meta[EPISODE_KEY] = arguments.get("episode")
        headers = {
            "Accept": "application/json, text/event-stream",
            MCP_PROTOCOL_VERSION_HEADER: str(_version_of(call)),
            MCP_METHOD_HEADER: CANCELLED,
        }
        notification = {"requestId": call.id, "_meta": meta}
        message = {"jsonrpc": "2.0", "method": CANCELLED, "params": notification}
        response = await self.post(self._url, json=message, headers=headers)
        if response.is_error:
            _log(f"a call could not be cancelled: {response.text[:ERROR_TEXT_CHARACTERS]}")

    async def _send_until_answered(
        self, request: httpx2.Request, options: dict[str, Any], method: str, cancelled: anyio.Event
    ) -> httpx2.Response:
        """Send a request, again after each loss of the connection."""
        resends = Resends(self._policy)
        while True:
            try:
                resends.connected()
                return await self._try(request, options)
            except _LostError as error:
                # `initialize` at a task's address starts an episode: carried out twice, it starts two.
                is_repeatable = error.was_refused or not (method == "initialize" and "/tasks/" in self._url)
                if not self._was_reached or not is_repeatable:
                    return _failure(request, error.message)
                try:
                    await resends.pause(ConnectionLostError(error.message), cancelled)
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
        method: str,
        number: str,
    ) -> AsyncGenerator[bytes]:
        """The events of a reply's stream; after a loss, those of the request that is sent again."""
        # The SDK closes the stream once it has the reply, so that only a broken one, or that of a cancelled
        # request, is read to its end.
        cancelled = self._pending[number]
        resends = Resends(self._policy)
        resends.connected()
        try:
            while True:
                try:
                    async for events in _whole_events(response):
                        yield events
                except httpx2.HTTPError:
                    pass
                finally:
                    await response.aclose()
                if cancelled.is_set():
                    return
                loss = ConnectionLostError(f"lost {self._url} in the middle of an answer")
                try:
                    await resends.pause(loss, cancelled)
                    resends.connected()
                    response = await self._send_until_answered(request, options, method, cancelled)
                except ConnectionLostError:
                    response = _failure(request, loss.message)
                if not _has_type(response, "text/event-stream"):
                    yield b"data: " + _reply_of(response, request) + b"\n\n"
                    return
        finally:
            self._pending.pop(number, None)

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
            # At a task's address the session was an episode: another one would be another attempt, and
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
            _log("the server had forgotten the session; a new one is open")
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


class _LostError(Exception):
    """A request has no answer. `was_refused`: the server cannot have got it."""

    def __init__(self, message: str, *, was_refused: bool) -> None:
        super().__init__(message)
        self.message = message
        self.was_refused = was_refused


async def _whole_events(response: httpx2.Response) -> AsyncIterator[bytes]:
    """The bytes of an event stream in whole events, without the beginning of one that was cut off."""
    pending = bytearray()
    async for chunk in response.aiter_bytes():
        # Only the new bytes are searched: an event may be as long as the longest reply.
        start = max(0, len(pending) - 3)
        pending += chunk
        ends = [pending.rfind(mark, start) + len(mark) for mark in EVENT_ENDS if mark in pending[start:]]
        if ends:
            yield bytes(pending[: max(ends)])
            del pending[: max(ends)]


def _method_and_id(request: httpx2.Request) -> tuple[str, str | None]:
    """The method of a JSON-RPC message and its id as JSON; no id if it is no request."""
    message = _message(request)
    number = message.get("id")
    method = str(message.get("method", ""))
    return method, json.dumps(number) if method and number is not None else None


def _cancelled_id(request: httpx2.Request) -> str:
    return json.dumps((as_object(_message(request).get("params")) or {}).get("requestId"))


def _message(request: httpx2.Request) -> dict[str, Any]:
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


def _is_header_value(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _has_type(response: httpx2.Response, content_type: str) -> bool:
    return response.headers.get("content-type", "").startswith(content_type)


def _failure(request: httpx2.Request, message: str) -> httpx2.Response:
    """A response that the SDK's transport relays as an error under the request's id."""
    # The transport drops errors of notifications: then the log is the only place to see them.
    _log(message)
    error = {"code": NO_SERVER, "message": message}
    return httpx2.Response(502, request=request, json={"jsonrpc": "2.0", "id": None, "error": error})


def _parse_error() -> SessionMessage:
    error = types.ErrorData(code=types.PARSE_ERROR, message="not a JSON-RPC message")
    return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=None, error=error))


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _log(text: str) -> None:
    sys.stderr.write(f"decathlon-mcp: {text}\n")
    sys.stderr.flush()
