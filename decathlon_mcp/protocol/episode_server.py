"""MCP server for one episode per connection or per address. An `EpisodeResolver` finds the episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import mcp_types as types
from mcp.server.context import CallNext, HandlerResult
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from decathlon_mcp import __version__
from decathlon_mcp.episodes.episode import EpisodeAccess
from decathlon_mcp.protocol.context import Context, connection_of, current_request_context, request_context_of
from decathlon_mcp.protocol.errors import INVALID_PARAMS, translated
from decathlon_mcp.protocol.relay import LEVELS, call_tool, list_tools, require_object
from decathlon_mcp.protocol.results import enveloped, is_modern
from decathlon_mcp.types import JsonObject, as_object

EPISODE_KEY = "decathlon/episode"
PROMPT_NAME = "task"


class EpisodeResolver(Protocol):
    """How a request leads to its episode."""

    handshake_only: bool
    """Is the MCP session the episode? Then revisions without one are declined."""

    def access(self, ctx: Context) -> EpisodeAccess:
        """Where this request sits, and at which episode. Raises DecathlonError."""
        ...

    def opened(self, ctx: Context) -> EpisodeAccess:
        """The same of the connection that is being initialized. Raises DecathlonError."""
        ...

    def address(self, ctx: Context, access: EpisodeAccess) -> str | None:
        """Where that seat has an address of its own, if it can have one."""
        ...


class EpisodeServer:
    """`server` is the SDK's; what it answers about tools is raw, past the SDK's models (see `envelope`)."""

    def __init__(self, way: EpisodeResolver) -> None:
        self._way = way
        self.server: Server[Any] = Server(
            "decathlon-mcp",
            version=__version__,
            title="Toolathlon",
            on_list_tools=_never,
            on_call_tool=_never,
            on_list_prompts=self._list_prompts,
            on_get_prompt=self._get_prompt,
            get_tool_input_schema=self._input_schema,
        )
        self.server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_level)
        self.server.middleware.append(self._serve)

    async def _serve(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        if self._way.handshake_only and is_modern(ctx.protocol_version):
            return decline_modern(ctx)
        match ctx.method:
            case "initialize":
                return await self._initialize(ctx, call_next)
            case "server/discover":
                return await self._discover(ctx, call_next)
            case "tools/list":
                access = self._seat(ctx)
                return enveloped(await list_tools(access, ctx), ctx.protocol_version, keeps=True)
            case "tools/call":
                name, arguments = call_params(ctx)
                result = await call_tool(self._seat(ctx), ctx, name, arguments)
                return enveloped(result, ctx.protocol_version)
            case _:
                return await call_next(ctx)

    def _seat(self, ctx: Context) -> EpisodeAccess:
        require_initialized(ctx)
        with translated():
            return self._way.access(ctx)

    async def _initialize(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        request_context_of(ctx).refused = True
        result = as_object(await call_next(ctx)) or {}
        with translated():
            episode = (access := self._way.opened(ctx)).episode
            told = {
                "id": access.id,
                "task": episode.task_name,
                "phase": str(episode.state.phase),
                "address": self._way.address(ctx, access),
                **({} if (waits_for := episode.waiting_for) is None else {"waits_for": waits_for}),
            }
            said = {**result, "instructions": episode.prompt.instructions, "_meta": {EPISODE_KEY: told}}
        request_context_of(ctx).refused = False
        return said

    async def _discover(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        result = as_object(await call_next(ctx)) or {}
        with translated():
            return {**result, "instructions": self._way.access(ctx).episode.prompt.instructions}

    def _input_schema(self, name: str) -> Mapping[str, Any] | None:
        """For the SDK's check of `Mcp-Param-*` headers; it gives no context, hence the context variable."""
        request_context = current_request_context.get()
        if (
            request_context is None
            or request_context.access is None
            or request_context.access.episode.tool_session is None
        ):
            return None
        tools = request_context.access.episode.tool_session.router.evaluator_tools
        return next((tool["inputSchema"] for tool in tools if tool["name"] == name), None)

    async def _list_prompts(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListPromptsResult:
        description = "The task: what to do, where, and how to finish."
        prompt = types.Prompt(name=PROMPT_NAME, title="Task", description=description)
        return types.ListPromptsResult(prompts=[prompt], ttl_ms=0, cache_scope="private")

    async def _get_prompt(self, ctx: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
        if params.name != PROMPT_NAME:
            raise MCPError(INVALID_PARAMS, f"there is no prompt {params.name!r}; there is {PROMPT_NAME!r}")
        with translated():
            prompt = self._way.access(ctx).episode.prompt
        text = types.TextContent(type="text", text=prompt.instructions)
        return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=text)])


def decline_modern(ctx: Context) -> HandlerResult:
    """Where a session is the episode: a client in `auto` mode then falls back to the handshake by itself."""
    supported = list(HANDSHAKE_PROTOCOL_VERSIONS)
    if ctx.method == "server/discover":
        return enveloped(
            {
                "supportedVersions": supported,
                "capabilities": {"tools": {}, "prompts": {}},
                "ttlMs": 0,
                "cacheScope": "private",
            },
            ctx.protocol_version,
        )
    raise MCPError(
        -32022,
        "at this address an MCP session is an episode: use a revision with a handshake, or start an episode "
        "at /mcp and use its own address",
        {"supported": supported, "requested": ctx.protocol_version},
    )


def require_initialized(ctx: Context) -> None:
    """Raw answers pass by the SDK's own gate; this is it."""
    if not connection_of(ctx).initialize_accepted:
        raise MCPError(INVALID_PARAMS, "initialize first")


def call_params(ctx: Context) -> tuple[str, JsonObject | None]:
    """Name and arguments of a tools/call. Raises MCPError where they have not the protocol's form."""
    params = ctx.params or {}
    name = params.get("name")
    if not isinstance(name, str):
        raise MCPError(INVALID_PARAMS, "tools/call: `name` must be a string")
    return name, require_object(params.get("arguments"), "tools/call: `arguments`")


async def set_level(ctx: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
    """Log messages of the task's servers below this level are not passed on to this connection."""
    assert params.level in LEVELS
    connection_of(ctx).state["log_level"] = params.level
    return types.EmptyResult()


async def _never(ctx: Context, params: object) -> Any:
    raise RuntimeError("tools are answered before the SDK's handlers are reached")
