"""Requests for tools that come through the SDK's server, and what else its servers here share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import mcp_types as types
from mcp.shared.exceptions import MCPError

from decathlon_mcp.driver_client.replies import CallParams, Reply
from decathlon_mcp.protocol.context import base_url_of, client_is_gone, request_context_of
from decathlon_mcp.protocol.envelopes import CALL, LIST
from decathlon_mcp.protocol.episode_tools import LOG_LEVEL_KEY, LOG_LEVELS
from decathlon_mcp.protocol.events import Kind
from decathlon_mcp.protocol.results import (
    INVALID_PARAMS,
    is_sessionless,
    relayed_error,
    translate_errors,
    with_envelope,
)
from decathlon_mcp.protocol.sdk import Context, connection_of, send_notification
from decathlon_mcp.protocol.tool_requests import Result, ToolRequest
from decathlon_mcp.types import JsonObject, as_object


async def sdk_result(ctx: Context, serve: Callable[[ToolRequest], Awaitable[Result]]) -> JsonObject:
    """The result of a request for tools, for the SDK. Raises MCPError."""
    request = SdkRequest(ctx)
    with translate_errors():
        result = await serve(request)
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
        super().__init__(
            method=ctx.method,
            request_id=ctx.request_id,
            name=name,
            arguments=CallParams.of(arguments).arguments,
            meta=dict(as_object((ctx.params or {}).get("_meta")) or {}),
            context=context,
            connection=None if sessionless else connection_of(ctx),
            is_sessionless=sessionless,
            can_stream=context.can_stream or sessionless,
        )
        self._ctx = ctx

    @property
    def base_url(self) -> str | None:
        return base_url_of(self._ctx)

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


async def set_log_level(ctx: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
    """Set the lowest level of log messages that this connection gets from the task's servers."""
    assert params.level in LOG_LEVELS
    connection_of(ctx).state[LOG_LEVEL_KEY] = params.level
    return types.EmptyResult()


async def unreachable_handler(ctx: Context, params: object) -> Any:
    """Declares the tools capability to the SDK; middleware answers before it is called."""
    raise RuntimeError("tools are answered in middleware")
