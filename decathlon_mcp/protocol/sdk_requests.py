"""Requests that come through the SDK's server, and what else its two servers here share.

These are the limits on what the SDK keeps of a request, or repeats in other messages, the level of log
messages, and `tools/list_changed` in sessions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import mcp_types as types
from mcp.server.connection import Connection
from mcp.server.context import CallNext, HandlerResult
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from decathlon_mcp import __version__
from decathlon_mcp.driver_client.replies import CallParams, Reply
from decathlon_mcp.episodes.access import EpisodeAccess
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.tools.offered import EpisodeTools
from decathlon_mcp.foreign_names import MAX_NAME_CHARACTERS
from decathlon_mcp.protocol.context import base_url_of, client_is_gone, request_context_of
from decathlon_mcp.protocol.episode_tools import LOG_LEVEL_KEY, LOG_LEVELS
from decathlon_mcp.protocol.requests import CALL, LIST, Kind, McpRequest, Result, ToolRequest
from decathlon_mcp.protocol.results import (
    INVALID_PARAMS,
    is_sessionless,
    relayed_error,
    translate_errors,
    with_envelope,
)
from decathlon_mcp.protocol.sdk import Context, connection_of, notify_tools_changed, send_notification
from decathlon_mcp.protocol.spans import RequestSpans
from decathlon_mcp.telemetry.spans import Spans
from decathlon_mcp.types import JsonObject, as_json, as_object

MAX_INITIALIZE_BYTES = 64 << 10
"""Parameters of `initialize`: the SDK keeps them as long as the session."""
CURRENT_KEY = "decathlon/current"
"""Key in a lobby connection's state of the access to the episode that it started last."""
_LISTENER_KEY = "decathlon/tool_listener"


class ToolServer(ABC):
    """What serves an address. `server` is the SDK's, with these options.

    `respond`: `serve`, or with `spans` the same in a span.
    """

    # Tools are answered in middleware, as dicts: the SDK's models drop unknown fields, and one tool or
    # content block that they cannot parse fails a whole list or result.
    def __init__(self, spans: Spans | None, **options: Any) -> None:
        self.server: Server[Any] = Server(
            "decathlon-mcp",
            version=__version__,
            title="Toolathlon",
            on_list_tools=_unreachable_handler,
            on_call_tool=_unreachable_handler,
            **options,
        )
        self.server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, _set_log_level)
        self.respond = self.serve
        if spans is not None:
            request_spans = RequestSpans(spans)
            # Instead of the SDK's, which would make a second span of each call that the SDK passes on.
            self.server.middleware[:] = [request_spans.middleware]
            self.respond = partial(request_spans.serve, self.serve)
        self.server.middleware.append(self._serve)

    @abstractmethod
    async def serve(self, request: ToolRequest) -> Result:
        """Serve a `tools/list` or `tools/call`. Raises DecathlonError."""

    @abstractmethod
    async def serve_again(self, request: ToolRequest, kind: Kind, agent: str) -> Result:
        """The answer to an earlier request, for a client that comes back for it. Raises DecathlonError."""

    @abstractmethod
    async def initialize(self, ctx: Context, result: JsonObject) -> JsonObject:
        """The result of `initialize`, from the SDK's. Raises MCPError."""

    @abstractmethod
    async def discover(self, ctx: Context, result: JsonObject) -> JsonObject:
        """The result of `server/discover`, from the SDK's. Raises MCPError."""

    async def _serve(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        if ctx.request_id is None:
            return await call_next(ctx)  # a notification, also with the method of a request
        check_request(ctx)
        return await self.serve_checked(ctx, call_next)

    async def serve_checked(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Serve a request that is within the limits."""
        match ctx.method:
            case "initialize":
                return await self.initialize(ctx, as_object(await call_next(ctx)) or {})
            case "server/discover":
                return await self.discover(ctx, as_object(await call_next(ctx)) or {})
            case "tools/list" | "tools/call":
                return await self._sdk_result(ctx)
            case _:
                return await call_next(ctx)

    async def _sdk_result(self, ctx: Context) -> JsonObject:
        """The result of a request for tools, for the SDK. Raises MCPError."""
        request = SdkRequest(ctx)
        with translate_errors():
            result = await self.respond(request)
        if isinstance(result, Reply):
            if result.error is not None:
                raise relayed_error(result.error)
            result = result.decoded()["result"]
        return with_envelope(result, ctx.protocol_version, cacheable=ctx.method == LIST)


class SdkRequest(ToolRequest):
    """A request that the SDK passes on: over stdio, or one that only the SDK can judge.

    Raises MCPError before `initialize`, and for params that do not have the protocol's types.
    """

    def __init__(self, ctx: Context) -> None:
        require_initialized(ctx)
        assert ctx.request_id is not None
        name, arguments = _call_params(ctx) if ctx.method == CALL else ("", None)
        context, sessionless = request_context_of(ctx), is_sessionless(ctx.protocol_version)
        meta = dict(as_object((ctx.params or {}).get("_meta")) or {})
        super().__init__(
            McpRequest(ctx.request_id, ctx.method, name, CallParams.of(arguments).arguments, meta),
            context,
            connection=None if sessionless else connection_of(ctx),
            is_sessionless=sessionless,
            can_stream=context.can_stream or sessionless,
        )
        self._ctx = ctx

    @property
    def base_url(self) -> str | None:
        return base_url_of(self._ctx)

    @property
    def is_http(self) -> bool:
        return self._ctx.request is not None

    @property
    def protocol_version(self) -> str:
        return self._ctx.protocol_version

    def http_header(self, name: str) -> str | None:
        return None if self._ctx.request is None else self._ctx.request.headers.get(name)

    async def accepted(self, kind: Kind, *, agent: str = "") -> None:
        pass  # what the SDK answers cannot be fetched again

    async def notify(self, method: str, params: JsonObject, *, with_reply: bool = True) -> None:
        await send_notification(self._ctx, method, params, with_reply=with_reply)

    async def is_gone(self) -> bool:
        return await client_is_gone(self._ctx)


def require_initialized(ctx: Context) -> None:
    """Raise MCPError for a request before `initialize`."""
    # Requests that are answered in middleware do not reach the SDK's own check.
    if not connection_of(ctx).initialize_accepted:
        raise MCPError(INVALID_PARAMS, "send `initialize` first")


def _call_params(ctx: Context) -> tuple[str, JsonObject | None]:
    params = ctx.params or {}
    name, arguments = params.get("name"), params.get("arguments")
    if not isinstance(name, str):
        raise MCPError(INVALID_PARAMS, "tools/call: `name` must be a string")
    if arguments is not None and as_object(arguments) is None:
        kind = type(arguments).__name__
        raise MCPError(INVALID_PARAMS, f"tools/call: `arguments` must be an object, not {kind}")
    return name, as_object(arguments)


async def _set_log_level(ctx: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
    """Set the lowest level of log messages that this connection gets from the task's servers."""
    assert params.level in LOG_LEVELS
    connection_of(ctx).state[LOG_LEVEL_KEY] = params.level
    return types.EmptyResult()


async def _unreachable_handler(ctx: Context, params: object) -> Any:
    """Declares the tools capability to the SDK; middleware answers before it is called."""
    raise RuntimeError("tools are answered in middleware")


def check_request(ctx: Context) -> None:
    """Raise MCPError for a long id or progress token, or an `initialize` with long parameters."""
    if ctx.method == "initialize" and len(as_json(ctx.params)) > MAX_INITIALIZE_BYTES:
        request_context_of(ctx).initialize_failed = True
        limit = f"{MAX_INITIALIZE_BYTES >> 10} KiB"
        raise MCPError(INVALID_PARAMS, f"initialize: its parameters are limited to {limit}")
    token = (as_object((ctx.params or {}).get("_meta")) or {}).get("progressToken")
    # A token is repeated in every notification of progress.
    for name, value in (("the request's id", ctx.request_id), ("`progressToken`", token)):
        if isinstance(value, str) and len(value) >= MAX_NAME_CHARACTERS:
            raise MCPError(INVALID_PARAMS, f"{name} has {MAX_NAME_CHARACTERS} characters or more")


class SessionListener:
    """Notifies the client of a session when the tools that it lists have changed."""

    # Episodes have weak references to it: it lives as long as the connection, which keeps it in its state.

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def tools_changed(self, tools: EpisodeTools) -> None:
        """Send the notification, unless the session lists the tools of another episode by now."""
        current: EpisodeAccess | None = self._connection.state.get(CURRENT_KEY)
        if current is None or current.episode.tools is tools:
            await notify_tools_changed(self._connection)


def listen_for_changes(connection: Connection | None, episode: Episode) -> None:
    """From now on the session, if there is one, is notified of changes of the episode's tools."""
    if connection is None:
        return
    listener = connection.state.get(_LISTENER_KEY)
    if listener is None:
        listener = connection.state[_LISTENER_KEY] = SessionListener(connection)
    episode.tools.listeners.add(listener)


def with_changing_tools(result: JsonObject) -> JsonObject:
    """The result of `initialize`, with the capability to announce changed tools."""
    # The SDK's server has no option for it.
    capabilities = {**(as_object(result.get("capabilities")) or {}), "tools": {"listChanged": True}}
    return {**result, "capabilities": capabilities}
