"""The bridge, `decathlon-mcp stdio --url URL`: relays stdin and stdout to a server over streamable HTTP.

Each message of the client is one POST, whose reply is written to stdout. Messages pass unchanged, except that
each `tools/call` without an operation id gets one. The bridge adds the HTTP headers that a session of the SDK
would add, sends a request again whose connection was lost, opens a forgotten lobby session again, and answers
for a server that does not.

Requires `mcp` 2.3 or later and nothing of the server: it runs on any system, without sandboxes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, cast
from urllib.parse import quote, urlsplit

import anyio
import anyio.to_thread
import httpx2
import mcp_types as types
from anyio.abc import TaskGroup
from mcp.client.streamable_http import MCP_SESSION_ID
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
from mcp_types.jsonrpc import jsonrpc_message_adapter

from decathlon_client.client_episode import EPISODE_KEY
from decathlon_client.client_errors import ConnectionLostError, RequestError
from decathlon_client.client_session import UNAVAILABLE
from decathlon_client.client_values import (
    JsonObject,
    as_object,
    as_objects,
    authorization,
    label_headers,
    one_line,
    parse_labels,
    server_token,
    server_url,
)
from decathlon_client.process import StdinPump, stop_on_signal
from decathlon_client.resends import RESEND_SECONDS, ResendPolicy, Resends, check_params, with_operation
from decathlon_client.sdk import http_client
from decathlon_client.task_groups import background_tasks

INITIALIZE_SECONDS = 5.0
"""How long the answer to `initialize` is waited for after the end of stdin."""
LIST_SECONDS = 120.0
"""How long the call of a tool that was not listed waits for the list, which has the names of its headers."""
DELETE_SECONDS = 5.0
"""For the DELETE of a session at the end: the server ends it by itself, and the user waits for the exit."""
RECONNECT_SECONDS = 2.0
"""Delay before the session's GET stream is opened again: a server waits 120 s for it by default."""
ERROR_TEXT_CHARACTERS = 500
BYTE_ORDER_MARK = "\ufeff"
"""Some programs begin their output with it."""
BATCH_VERSION = "2025-03-26"
"""The only revision with batches."""
MAX_BATCH = 100
"""Messages in one batch, as the server takes."""
MAX_TOOLS = 10_000
"""Number of tools beyond which the name of a tool that was not listed is not remembered."""
NO_SERVER = -32000
CANCELLED = "notifications/cancelled"
INITIALIZED = "notifications/initialized"
TOOLS_CHANGED = "notifications/tools/list_changed"
LOBBY_CALL = "call_tool"
"""The lobby's tool that calls one of an episode."""
ENVELOPE_PREFIX = "io.modelcontextprotocol/"
EVENT_STREAM = "text/event-stream"
SENT_HEADERS = {"Accept": f"application/json, {EVENT_STREAM}", "Content-Type": "application/json"}


async def bridge(url: str | None, task: str | None, labels: Mapping[str, str] | None = None) -> int:
    """Relay until stdin ends or a signal stops this process, then end the session with a DELETE.

    `url` is a server's root or the address of a lobby, task or episode; the token is in `DECATHLON_TOKEN`.
    `labels`: labels of each episode that starts. Returns the exit status.
    """
    try:
        endpoint, token = address(url, task), server_token(None)
    except ValueError as error:
        _log(str(error))
        return 1
    _log(f"relaying stdin and stdout to {endpoint}")
    source, sink = socket.socketpair()
    with source, sink, source.makefile("r", encoding="utf-8", errors="replace") as stdin:
        loop, stdin_ended = asyncio.get_running_loop(), anyio.Event()
        with StdinPump(0, sink, lambda: loop.call_soon_threadsafe(stdin_ended.set)) as pump:
            async with background_tasks() as tasks:

                async def end_on_signal() -> None:
                    if await stop_on_signal(pump):
                        # Also while something waits for the server.
                        tasks.cancel_scope.cancel()

                async def lines() -> AsyncGenerator[str]:
                    # Abandoned once a message could not be relayed: there may never be another line.
                    while line := await anyio.to_thread.run_sync(stdin.readline, abandon_on_cancel=True):
                        yield line

                tasks.start_soon(end_on_signal)
                await Bridge(endpoint, token, labels or {}, stdin_ended).run(lines())
    return 0


def main(arguments: Sequence[str]) -> int:
    """`decathlon-mcp stdio` where only the client is installed. Returns the exit status."""
    parser = argparse.ArgumentParser("decathlon-mcp stdio")
    parser.add_argument("--url")
    parser.add_argument("--task")
    parser.add_argument("--label", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(arguments)
    try:
        labels = parse_labels(options.label)
    except ValueError as error:
        parser.error(str(error))
    return anyio.run(bridge, options.url, options.task, labels)


def address(url: str | None, task: str | None = None) -> str:
    """The MCP address for a server's URL: its lobby or, with a task, that task's; other addresses unchanged.

    None: see `server_url`. Raises ValueError if it is not an HTTP URL.
    """
    url = server_url(url)
    if urlsplit(url).path.startswith(("/tasks/", "/episodes/")) and task is None:
        return url
    root = url.rstrip("/").removesuffix("/mcp")
    return f"{root}/mcp" if task is None else f"{root}/tasks/{quote(task, safe='')}/mcp"


class _Pending:
    """A request without an answer, and the signals by which the client's cancellation reaches it.

    Clients use an id again while its request is in flight, so that the id does not name a request.
    """

    def __init__(self, request: JsonObject) -> None:
        self.request = request
        self.cancelled = anyio.Event()
        self.scope = anyio.CancelScope()


class _LostError(ConnectionLostError):
    """A request has no answer. `was_refused`: the server cannot have got it."""

    def __init__(self, message: str, *, was_refused: bool = False) -> None:
        super().__init__(message)
        self.was_refused = was_refused


class Bridge:
    """Relays messages between stdio and one address. `stdin_ended`: set before its last lines are read.

    A request whose connection is lost is sent again until the server answers, or for `RESEND_SECONDS`. Before
    the first answer none is, so that a wrong address is reported at once.
    """

    def __init__(self, url: str, token: str, labels: Mapping[str, str], stdin_ended: anyio.Event) -> None:
        headers = {**authorization(token), **label_headers(labels)}
        self._http = http_client(headers, follow_redirects=False)
        self._url = url
        self._stdin_ended = stdin_ended
        self._initialize: JsonObject = {}
        self._version: str | None = None
        """The protocol revision that `initialize` agreed on."""
        self._session_id: str | None = None
        self._renewing = anyio.Lock()
        self._renewed = anyio.Event()
        self._policy = ResendPolicy(RESEND_SECONDS)
        self._was_reached = False
        self._pending: set[_Pending] = set()
        self._header_maps: dict[str, dict[tuple[str, ...], str]] = {}
        self._writing = anyio.Lock()

    async def run(self, lines: AsyncIterable[str]) -> None:
        """Relay the client's messages until the lines end, then end the session with a DELETE."""
        async with self._http:
            try:
                async with background_tasks() as tasks:
                    async for line in lines:
                        if not await self._take(line, tasks):
                            break
            finally:
                if self._session_id is not None:
                    with anyio.move_on_after(DELETE_SECONDS, shield=True), suppress(httpx2.HTTPError):
                        await self._http.delete(self._url, headers=self._session_headers())

    async def _take(self, line: str, tasks: TaskGroup) -> bool:
        """Relay one line. False: stdin ended before `initialize` was answered."""
        try:
            content: Any = json.loads(line.removeprefix(BYTE_ORDER_MARK))
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, list):
            return await self._take_message(content, tasks)
        items = cast("list[Any]", content)
        if self._version == BATCH_VERSION and 1 <= len(items) <= MAX_BATCH:
            # Answered one by one, as its revision allows: then each can be sent again.
            return all([await self._take_message(item, tasks) for item in items])
        ids = [number for item in items[:MAX_BATCH] if (number := _id_of(item)) is not None]
        for number in ids or [None]:
            text = f"a batch has 1 to {MAX_BATCH} messages and is of revision {BATCH_VERSION}"
            await self._write(_error(number, types.INVALID_REQUEST, text))
        return True

    async def _take_message(self, content: Any, tasks: TaskGroup) -> bool:
        """As `_take`, for one message."""
        try:
            jsonrpc_message_adapter.validate_python(content, by_name=False)
        except (ValueError, RecursionError):
            # Under its id where it has one: its client waits for an answer.
            await self._write(_error(_id_of(content), types.PARSE_ERROR, "not a JSON-RPC message"))
            return True
        message: JsonObject = content
        method, params = message.get("method"), as_object(message.get("params")) or {}
        if method is None or message.get("id") is None:
            if method == CANCELLED:
                await self._cancel(message, params)
            else:
                await self._notify(message)
            if method == INITIALIZED and self._session_id is not None:
                tasks.start_soon(self._listen)
            return True
        try:
            check_params(params)
        except RequestError as error:
            await self._write(_error(message["id"], types.INVALID_PARAMS, error.message))
            return True
        if method == "tools/call":
            message["params"] = with_operation(params)
        pending = _Pending(message)
        self._pending.add(pending)
        if method != "initialize":
            tasks.start_soon(self._answer, pending)
            return True
        # Whatever follows belongs to the session whose id is in the answer.
        self._initialize, self._session_id, self._version = message, None, None
        async with background_tasks() as waiting:
            waiting.start_soon(self._give_up, pending.scope)
            await self._answer(pending)
        return not pending.scope.cancelled_caught

    async def _give_up(self, initializing: anyio.CancelScope) -> None:
        """Cancel the scope a while after the end of stdin, which nobody reads meanwhile."""
        await self._stdin_ended.wait()
        await anyio.sleep(INITIALIZE_SECONDS)
        initializing.cancel()

    async def _answer(self, pending: _Pending) -> None:
        """Send a request until it is answered, and write the answer, unless it is cancelled."""
        try:
            with pending.scope:
                await self._list_tool(pending.request)
                if (reply := await self._reply(pending)) is not None:
                    await self._write(reply)
        finally:
            self._pending.discard(pending)

    async def _list_tool(self, call: JsonObject) -> None:
        """List the tools if the headers of a call depend on the schema of a tool that has not been listed."""
        params, meta = as_object(call.get("params")) or {}, _meta(call)
        name = params.get("name")
        has_headers = call["method"] == "tools/call" and _version_of(call) is not None
        if not has_headers or not params.get("arguments") or not isinstance(name, str):
            return
        if name not in self._header_maps:
            number = f"decathlon-bridge-{secrets.token_hex(8)}"
            envelope = {key: value for key, value in meta.items() if key.startswith(ENVELOPE_PREFIX)}
            request = {"jsonrpc": "2.0", "id": number, "method": "tools/list", "params": {"_meta": envelope}}
            with anyio.move_on_after(LIST_SECONDS):
                await self._reply(_Pending(request))
            if len(self._header_maps) < MAX_TOOLS:
                self._header_maps.setdefault(name, {})

    async def _reply(self, pending: _Pending) -> JsonObject | None:
        """Send a request, again after each loss of the connection, and return the answer.

        Writes the messages before the answer. None: the request was cancelled and has no answer.
        """
        request, resends = pending.request, Resends(self._policy)
        while True:
            sent_at = anyio.current_time()
            try:
                async with aclosing(self._messages(request)) as messages:
                    async for message in messages:
                        if "method" in message:
                            await self._write(message)
                            continue
                        self._note(request, message)
                        return {**message, "id": request["id"]}
                raise _LostError(f"lost {self._url} in the middle of an answer")  # noqa: TRY301  (one path for losses)
            except _LostError as loss:
                if pending.cancelled.is_set():
                    return None
                # `initialize` at a task's address starts an episode: carried out twice, it starts two.
                starts_episode = request["method"] == "initialize" and "/tasks/" in self._url
                try:
                    if not self._was_reached or (starts_episode and not loss.was_refused):
                        raise
                    await resends.pause(loss, pending.cancelled, None if loss.was_refused else sent_at)
                except ConnectionLostError:
                    _log(loss.message)
                    return _error(request["id"], NO_SERVER, loss.message)

    async def _messages(self, message: JsonObject) -> AsyncGenerator[JsonObject]:
        """Send a message once, in a new session if the server forgot the last one, and yield what it answers.

        Raises _LostError if the server was not reached, or broke off.
        """
        session_id = None if _version_of(message) else self._session_id
        try:
            for is_second in (False, True):
                async with self._post(message) as response:
                    if not is_second and self._is_moved(response):
                        continue
                    if is_second or session_id is None or response.status_code != 404:
                        async for answer in self._read(message, response):
                            yield answer
                        return
                # The server has not looked at the request, so it is not carried out twice.
                if not await self._renew_session(session_id):
                    yield _failure("the server has ended this session and its episode; start a new one")
                    return
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise _LostError(f"no server answers at {self._url}: {_text(error)}", was_refused=True) from None
        except httpx2.HTTPError as error:
            text = f"lost {self._url}: {_text(error)}; it is not known whether the request was carried out"
            raise _LostError(text) from None

    def _is_moved(self, response: httpx2.Response) -> bool:
        """Whether a proxy redirects to another path of its own, which is the address from now on."""
        following = response.next_request
        if following is None or following.method != "POST":
            return False
        here, there = response.url, following.url
        if (here.scheme, here.host, here.port) != (there.scheme, there.host, there.port):
            return False  # it would get the token, or the arguments of calls
        self._url = str(there)
        return True

    def _post(self, message: JsonObject) -> Any:
        headers = {**SENT_HEADERS, **self._headers(message)}
        return self._http.stream("POST", self._url, content=json.dumps(message), headers=headers)

    async def _read(self, message: JsonObject, response: httpx2.Response) -> AsyncGenerator[JsonObject]:
        """The messages in a response. Raises _LostError for the response of a proxy without a server."""
        is_request = message.get("id") is not None
        content_type = response.headers.get("content-type", "")
        if response.is_success:
            self._was_reached = True
            if message is self._initialize:
                self._session_id = response.headers.get(MCP_SESSION_ID)
            if is_request and content_type.startswith(EVENT_STREAM):
                async for event in _events(response):
                    yield event
                return
        body = (await response.aread()).decode("utf-8", "replace").strip()
        if content_type.startswith("application/json"):
            self._was_reached = True
            yield _decoded(body)
        elif not response.is_success:
            location = response.headers.get("location")
            shown = f"redirects to {location}: use that address" if location else body[:ERROR_TEXT_CHARACTERS]
            text = f"HTTP {response.status_code}: {shown}"
            if response.status_code in UNAVAILABLE:
                raise _LostError(text)
            yield _failure(text)
        elif is_request:
            yield _failure(f"the answer is not MCP: {content_type}")

    async def _notify(self, message: JsonObject) -> None:
        """Send a notification, or the client's answer to a request of the server."""
        try:
            async with aclosing(self._messages(message)) as answers:
                async for answer in answers:
                    if error := as_object(answer.get("error")):
                        _log(f"{message.get('method', 'an answer')} was refused: {error.get('message')}")
        except _LostError as error:
            _log(error.message)

    async def _cancel(self, notification: JsonObject, params: JsonObject) -> None:
        """Let nobody wait for a request any more, and tell the server."""
        number = json.dumps(params.get("requestId"))
        for pending in [pending for pending in self._pending if json.dumps(pending.request["id"]) == number]:
            call = pending.request
            if _version_of(call) is None:
                pending.cancelled.set()
                continue
            # Without a session, the end of its connection cancels a request; but the bridge could come back
            # for the answer to a call.
            pending.scope.cancel()
            if call["method"] == "tools/call":
                meta, arguments = _meta(call), as_object(call["params"].get("arguments")) or {}
                if call["params"].get("name") == LOBBY_CALL:
                    meta = {**meta, EPISODE_KEY: arguments.get("episode")}
                own = {**notification, "params": {"requestId": call["id"], "_meta": meta}}
                await self._notify(own)
        if self._version is not None:
            await self._notify(notification)

    async def _renew_session(self, session_id: str) -> bool:
        """Open another session with the same `initialize`; False if there can be none."""
        async with self._renewing:
            if self._session_id != session_id:
                return True  # another request has renewed it
            # At a task's address the session was an episode: another session would be another attempt, and
            # nobody would know.
            if "/tasks/" in self._url:
                return False
            async with self._post(self._initialize) as response:
                await response.aread()
            if MCP_SESSION_ID not in response.headers:
                return False
            self._session_id = response.headers[MCP_SESSION_ID]
            async with self._post({"jsonrpc": "2.0", "method": INITIALIZED}) as response:
                await response.aread()
            _log("the server had forgotten the session; a new one is open")
            self._renewed.set()
            self._renewed = anyio.Event()
            return True

    async def _listen(self) -> None:
        """Relay the session's GET stream, which is opened again whenever it ends.

        A server ends a session whose GET stream does not come back, and a task's episode with it.
        """
        while True:
            renewed, delay = self._renewed, RECONNECT_SECONDS
            headers = {"Accept": EVENT_STREAM, **self._session_headers()}
            with suppress(httpx2.HTTPError):
                async with self._http.stream("GET", self._url, headers=headers) as response:
                    if response.is_success:
                        async for event in _events(response):
                            await self._write(event)
                    elif response.is_client_error:
                        # Only a request renews a session: listening alone must not keep one alive.
                        delay = None
            with anyio.move_on_after(delay):
                await renewed.wait()
            if renewed.is_set():
                await self._write({"jsonrpc": "2.0", "method": TOOLS_CHANGED})

    def _note(self, request: JsonObject, reply: JsonObject) -> None:
        """Remember what later headers depend on: the negotiated version and the tools' header annotations."""
        result = as_object(reply.get("result")) or {}
        if request is self._initialize and result:
            self._version = str(result.get("protocolVersion"))
        for tool in as_objects(result.get("tools")):
            schema = tool.get("inputSchema")
            if find_invalid_x_mcp_header(schema) is None:
                self._header_maps[str(tool.get("name"))] = x_mcp_header_map(schema)

    def _session_headers(self) -> dict[str, str]:
        return _sendable({MCP_SESSION_ID: self._session_id, MCP_PROTOCOL_VERSION_HEADER: self._version})

    def _headers(self, message: JsonObject) -> dict[str, str]:
        """The headers that a session of the SDK sets in the era that the message belongs to."""
        if message is self._initialize:
            return {}
        version = _version_of(message)
        if version is None:
            return self._session_headers()
        # An answer can have any further members, such as these.
        params, method = as_object(message.get("params")) or {}, str(message.get("method"))
        headers = {MCP_PROTOCOL_VERSION_HEADER: version, MCP_METHOD_HEADER: method}
        name = params.get(NAME_BEARING_METHODS.get(method, ""))
        if isinstance(name, str):
            headers[MCP_NAME_HEADER] = encode_header_value(name)
        if method == "tools/call":
            header_map = self._header_maps.get(str(name), {})
            headers |= mcp_param_headers(header_map, as_object(params.get("arguments")) or {})
        return _sendable(headers)

    async def _write(self, message: JsonObject) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        async with self._writing:
            await anyio.to_thread.run_sync(_write_stdout, line)


def _write_stdout(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _sendable(headers: Mapping[str, str | None]) -> dict[str, str]:
    """The headers with values that HTTP can have, whether the client or the server chose them."""
    # The HTTP client raises for other values; without the header the server refuses the request.
    return {
        name: value for name, value in headers.items() if value and value.isascii() and value.isprintable()
    }


def _id_of(content: object) -> int | str | None:
    """The id of what is perhaps a request; None if it is none, or has none that an answer can have."""
    message = as_object(content) or {}
    number: object = message.get("id") if "method" in message else None
    return number if isinstance(number, str) or type(number) is int else None


def _meta(message: JsonObject) -> JsonObject:
    return as_object((as_object(message.get("params")) or {}).get("_meta")) or {}


def _version_of(message: JsonObject) -> str | None:
    """The protocol revision that a message without a session names; None for a message of a session."""
    version = _meta(message).get(types.PROTOCOL_VERSION_META_KEY)
    return version if isinstance(version, str) else None


async def _events(response: httpx2.Response) -> AsyncGenerator[JsonObject]:
    """The messages in an event stream, without an event that was cut off."""
    async for event in httpx2.EventSource(response, max_event_size=None):
        if event.data:
            yield _decoded(event.data)


def _decoded(text: str) -> JsonObject:
    """The message in the server's JSON, or an error in its place."""
    try:
        message = as_object(json.loads(text)) or {}
    except (ValueError, RecursionError):
        message = {}
    is_message = isinstance(message.get("method"), str) or "result" in message or "error" in message
    return message if is_message else _failure("the answer is not MCP")


def _error(number: object, code: int, message: str) -> JsonObject:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}


def _failure(message: str) -> JsonObject:
    """The answer to a request that has none, in the server's place."""
    # A notification has no answer: then the log is the only place to see it.
    _log(message)
    return _error(None, NO_SERVER, message)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _log(text: str) -> None:
    """Write a line to stderr, which programs show as the log of the bridge."""
    sys.stderr.write(f"decathlon-mcp: {one_line(text)}\n")
    sys.stderr.flush()
