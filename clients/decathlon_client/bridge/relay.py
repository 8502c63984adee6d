"""The messages between a client and a server, and what a session of the SDK would add to them."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import anyio
import mcp_types as types
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
from decathlon_client.bridge.http import CANCELLED, log
from decathlon_client.episode import EPISODE_KEY
from decathlon_client.errors import RequestError
from decathlon_client.requests import check_params, with_operation
from decathlon_client.values import as_object, as_objects

LIST_SECONDS = 120.0
"""How long the call of a tool that was not listed waits for the list, which has the names of its headers."""
INITIALIZE_SECONDS = 5.0
"""How long the answer to `initialize` is waited for after the end of stdin."""
LOBBY_CALL = "call_tool"
"""The lobby's tool that calls one of an episode."""
ENVELOPE_PREFIX = "io.modelcontextprotocol/"
MAX_NOT_LISTED = 1_000
"""Names of tools that are remembered as not listed."""

Notify: TypeAlias = Callable[[types.JSONRPCNotification, Mapping[str, str]], Awaitable[None]]
"""Sends a notification with these headers, past the SDK's transport."""


class Relay:
    """Passes messages between two transports of the SDK, and adds the headers that HTTP requires."""

    def __init__(self, client: Any, server: Any, notify: Notify, stdin_ended: anyio.Event) -> None:
        """`stdin_ended` is set at the end of stdin, also while what came before has not been read."""
        self._from_client, self._to_client = client
        self._from_server, self._to_server = server
        self._notify = notify
        self._stdin_ended = stdin_ended
        self._version: str | None = None
        self._initialize_id: types.RequestId | None = None
        self._initialize_answered = anyio.Event()
        self._header_maps: dict[str, dict[tuple[str, ...], str]] = {}
        self._not_listed: set[str] = set()
        self._own_lists: dict[types.RequestId, anyio.Event] = {}
        """The bridge's own requests for the list of tools."""
        self._in_flight: set[types.RequestId] = set()
        self._renamed: dict[types.RequestId, types.RequestId] = {}
        """The client's ids of requests that were sent under another id."""
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
                if (refusal := _refusal(message)) is not None:
                    await self._to_client.send(refusal)
                    continue
                if isinstance(message, types.JSONRPCRequest):
                    self._rename(message)
                if isinstance(message, types.JSONRPCRequest) and message.method == "tools/call":
                    if message.params:
                        message.params = with_operation(message.params)
                    if _version_of(message) is not None:
                        self._calls[message.id] = message
                    if self._needs_list(message):
                        tasks.start_soon(self._send_after_list, item)
                        continue
                if not await self._send(item):
                    return
                if (cancelled := self._cancelled_call(message)) is not None:
                    tasks.start_soon(self._cancel, cancelled)

    def _cancelled_call(self, message: types.JSONRPCMessage) -> types.JSONRPCRequest | None:
        """The call without a session that a message cancels."""
        if not isinstance(message, types.JSONRPCNotification) or message.method != CANCELLED:
            return None
        number = cancelled_request_id_from_params(message.params)
        if number is None:
            return None
        self._in_flight.discard(number)
        return self._calls.pop(number, None)

    def _rename(self, request: types.JSONRPCRequest) -> None:
        """Give a request an id of its own if its id is in flight: the SDK's transport drops the first one."""
        if request.id in self._in_flight:
            own = _own_id()
            self._renamed[own], request.id = request.id, own
        self._in_flight.add(request.id)

    async def _cancel(self, call: types.JSONRPCRequest) -> None:
        """Tell the server that nobody comes back for the answer to a call without a session."""
        # The SDK's transport cancels it by losing the connection, after which the bridge could come back.
        params = call.params or {}
        meta = dict(as_object(params.get("_meta")) or {})
        if params.get("name") == LOBBY_CALL:
            meta[EPISODE_KEY] = (as_object(params.get("arguments")) or {}).get("episode")
        notification = types.JSONRPCNotification(
            jsonrpc="2.0", method=CANCELLED, params={"requestId": call.id, "_meta": meta}
        )
        await self._notify(notification, self._headers(notification))

    async def _send(self, item: SessionMessage) -> bool:
        """Send a message to the server. False: stdin ended before `initialize` was answered."""
        message = item.message
        item.metadata = ClientMessageMetadata(headers=self._headers(message))
        if not (isinstance(message, types.JSONRPCRequest) and message.method == "initialize"):
            await self._to_server.send(item)
            return True
        # Whatever follows belongs to the session whose id is in the answer.
        self._initialize_id, self._initialize_answered = message.id, anyio.Event()
        await self._to_server.send(item)
        async with background_tasks() as tasks:
            tasks.start_soon(self._give_up_initialize, tasks.cancel_scope)
            await self._initialize_answered.wait()
        return self._initialize_answered.is_set()

    async def _give_up_initialize(self, waiting: anyio.CancelScope) -> None:
        """Cancel the scope a while after the end of stdin, which nobody reads meanwhile."""
        await self._stdin_ended.wait()
        await anyio.sleep(INITIALIZE_SECONDS)
        waiting.cancel()

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
        number = _own_id()
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
                log(f"unreadable message from the server: {item}")
                continue
            self._note(item.message)
            if isinstance(item.message, (types.JSONRPCResponse, types.JSONRPCError)):
                answered = self._own_lists.get(str(item.message.id))
                if answered is not None:
                    answered.set()
                    continue
                if (number := item.message.id) is not None:
                    self._calls.pop(number, None)
                    self._in_flight.discard(number)
                    item.message.id = self._renamed.pop(number, number)
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
        """The headers of one message."""
        # The SDK's HTTP client raises for other values, which would end the bridge; without the header the
        # server refuses the request.
        headers = self._session_headers(message).items()
        return {name: value for name, value in headers if value.isascii() and value.isprintable()}

    def _session_headers(self, message: types.JSONRPCMessage) -> dict[str, str]:
        """The headers that an SDK session sets in the era that the message belongs to."""
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


def _own_id() -> str:
    return f"decathlon-bridge-{secrets.token_hex(8)}"


def _refusal(message: types.JSONRPCMessage) -> SessionMessage | None:
    """The answer to a request that cannot be sent as it was written; None for every other message."""
    if not isinstance(message, types.JSONRPCRequest):
        return None
    try:
        check_params(message.params or {})
    except RequestError as error:
        data = types.ErrorData(code=types.INVALID_PARAMS, message=error.message)
        return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=message.id, error=data))
    return None


def _parse_error() -> SessionMessage:
    error = types.ErrorData(code=types.PARSE_ERROR, message="not a JSON-RPC message")
    return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=None, error=error))
