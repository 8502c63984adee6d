"""MCP server for one episode per connection or per address; an `EpisodeResolver` finds the episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import mcp_types as types
from mcp.server.connection import Connection
from mcp.server.context import CallNext, HandlerResult
from mcp.shared.exceptions import MCPError
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from decathlon_mcp.episodes.access import EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import EpisodeEndedError, UnknownEpisodeError
from decathlon_mcp.foreign_names import quoted
from decathlon_mcp.protocol.context import (
    RequestContext,
    base_url_of,
    current_request_context,
    episode_address,
    page_address,
    request_context_of,
)
from decathlon_mcp.protocol.episode_tools import (
    EVALUATE,
    answer_is_lost,
    call_tool,
    list_tools,
    tools_after_end,
)
from decathlon_mcp.protocol.requests import LIST, Kind, Result, ToolRequest
from decathlon_mcp.protocol.results import INVALID_PARAMS, is_sessionless, translate_errors, with_envelope
from decathlon_mcp.protocol.sdk import Context, connection_of
from decathlon_mcp.protocol.sdk_requests import (
    ToolServer,
    listen_for_changes,
    require_initialized,
    with_changing_tools,
)
from decathlon_mcp.telemetry.spans import Spans
from decathlon_mcp.types import JsonObject

EPISODE_KEY = "decathlon/episode"
PROMPT_NAME = "task"
UNSUPPORTED_PROTOCOL_VERSION = -32022
_NEEDING_SESSION = frozenset(
    {"server/discover", "tools/list", "tools/call", "prompts/list", "prompts/get", "subscriptions/listen"}
)
"""Methods of revisions without sessions that cannot be served where the session is the episode."""
NO_CALLS = (
    "This MCP session made no tool call before `evaluate`. If you did make calls, your client opens a "
    "session for each of them, and at a task's address every session is an episode of its own. Start an "
    "episode in the lobby, /mcp, with `start_episode`, and connect to the address that it returns."
)


class EpisodeResolver(Protocol):
    """Finds the episode that a request concerns."""

    handshake_only: bool
    """Whether the MCP session is the episode. Revisions without sessions are then rejected."""

    def access(self, context: RequestContext) -> EpisodeAccess:
        """Access to the request's episode. Raises DecathlonError."""
        ...

    def open(self, context: RequestContext) -> EpisodeAccess:
        """Access for a connection that is being initialized; may start an episode. Raises DecathlonError."""
        ...


class AddressResolver:
    """For `/episodes/{id}/mcp`: the address names the episode; any number of clients can connect to it."""

    handshake_only = False

    def access(self, context: RequestContext) -> EpisodeAccess:
        access = context.access
        if access is None:
            raise UnknownEpisodeError("this session has no episode: initialize a new session")
        return access

    def open(self, context: RequestContext) -> EpisodeAccess:
        return self.access(context)


class TaskSessionResolver(AddressResolver):
    """For `/tasks/{id}/mcp`: the session is the episode, which `initialize` starts."""

    handshake_only = True

    def __init__(self, registry: EpisodeRegistry) -> None:
        self._registry = registry

    def access(self, context: RequestContext) -> EpisodeAccess:
        if context.access is None:
            raise EpisodeEndedError("the episode of this session is over: initialize a new session")
        return super().access(context)

    def open(self, context: RequestContext) -> EpisodeAccess:
        if context.access is None:
            assert context.task_id is not None
            episode = self._registry.start(context.task_id, context.principal, labels=context.labels)
            context.add_started(episode)
            context.access = EpisodeAccess.by_session(episode, context.principal)
        return context.access


class FixedResolver(AddressResolver):
    """For a stdio process or an in-memory client that serves a single episode."""

    def __init__(self, access: EpisodeAccess) -> None:
        self._access = access

    def access(self, context: RequestContext) -> EpisodeAccess:
        return self._access


class EpisodeServer(ToolServer):
    """Serves the tools and the prompt of the episode that the resolver finds."""

    def __init__(self, resolver: EpisodeResolver, spans: Spans | None = None) -> None:
        self._resolver = resolver
        super().__init__(
            spans,
            on_list_prompts=self._list_prompts,
            on_get_prompt=self._get_prompt,
            get_tool_input_schema=self._input_schema,
        )

    async def serve_checked(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        if self._resolver.handshake_only and is_sessionless(ctx.protocol_version):
            # Of methods that revisions without sessions do not have, the SDK says that there are none.
            return _reject_sessionless(ctx) if ctx.method in _NEEDING_SESSION else await call_next(ctx)
        self._note_use(ctx)
        if ctx.method == "initialize":
            request_context_of(ctx).initialize_failed = True
        return await super().serve_checked(ctx, call_next)

    async def serve(self, request: ToolRequest) -> Result:
        if request.method == LIST:
            return await self._list_tools(request)
        return await self._call_tool(request)

    async def serve_again(self, request: ToolRequest, kind: Kind, agent: str) -> Result:
        del agent  # the address names the episode
        match kind:
            case Kind.LIST:
                return await self._list_tools(request)
            case Kind.EVALUATE:
                request.name = EVALUATE
                return await self._call_tool(request)
            case Kind.CALL | Kind.CLAIM:
                return await call_tool(self._resolver.access(request.context), request, again=kind)
            case _:
                raise answer_is_lost()

    async def _call_tool(self, request: ToolRequest) -> Result:
        access = self._resolver.access(request.context)
        episode = access.episode
        is_untouched = episode.calls.sent == 0 and episode.claim is None
        result = await call_tool(access, request)
        if (
            isinstance(result, dict)
            and request.name == EVALUATE
            and self._resolver.handshake_only
            and is_untouched
            and episode.verdict is not None
        ):
            first, *others = result["content"]
            return {**result, "content": [first, {"type": "text", "text": NO_CALLS}, *others]}
        return result

    async def _list_tools(self, request: ToolRequest) -> JsonObject:
        if self._resolver.handshake_only and request.context.access is None:
            # A session of an earlier server, whose episode this one does not know.
            return tools_after_end("decathlon", can_evaluate=True)
        access = self._resolver.access(request.context)
        episode = access.episode
        if episode.state.phase is Phase.ENDED and (episode.was_ready or episode.verdict is not None):
            names = episode.sandbox_factory.tool_names
            return tools_after_end(names, can_evaluate=access.can_evaluate)
        # Again, for a session of an earlier server.
        listen_for_changes(request.connection, episode)
        await request.accepted(Kind.LIST)
        return await list_tools(access, request)

    def _note_use(self, ctx: Context) -> None:
        # At a task's address clients send these before they know whether anybody will play.
        if ctx.method in ("initialize", "server/discover") or ctx.method.startswith("notifications/"):
            return
        if (access := request_context_of(ctx).access) is not None:
            access.episode.lease.mark_used()

    def _access(self, ctx: Context) -> EpisodeAccess:
        require_initialized(ctx)
        with translate_errors():
            return self._resolver.access(request_context_of(ctx))

    async def initialize(self, ctx: Context, result: JsonObject) -> JsonObject:
        request_context = request_context_of(ctx)
        with translate_errors():
            access = self._resolver.open(request_context)
            episode = access.episode
            base_url = base_url_of(ctx)
            info: JsonObject = {
                "id": access.id,
                "public_id": episode.public_id,
                "page": page_address(base_url, episode.public_id, has_page=request_context.has_page),
                "task": episode.task_name,
                "phase": str(episode.state.phase),
                "address": episode_address(base_url, access.id),
            }
            if episode.waits_for is not None:
                info["waits_for"] = episode.waits_for
            instructions = episode.prompt.instructions
        request_context.initialize_failed = False
        listen_for_changes(_session_of(ctx), episode)
        return {**with_changing_tools(result), "instructions": instructions, "_meta": {EPISODE_KEY: info}}

    async def discover(self, ctx: Context, result: JsonObject) -> JsonObject:
        with translate_errors():
            return {**result, "instructions": self._access(ctx).episode.prompt.instructions}

    def _input_schema(self, name: str) -> Mapping[str, Any] | None:
        """The schema of a tool, for the SDK's check of `Mcp-Param-*` headers."""
        # Without this function the SDK runs `tools/list` before every sessionless `tools/call` with
        # arguments. It passes a name and no request, hence the context variable.
        request_context = current_request_context.get()
        if (
            request_context is None
            or request_context.access is None
            or request_context.access.episode.tools.router is None
        ):
            return None
        tools = request_context.access.episode.tools.router.evaluator_tools
        return next((tool["inputSchema"] for tool in tools if tool["name"] == name), None)

    async def _list_prompts(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListPromptsResult:
        description = "The task: what to do, where, and how to finish."
        prompt = types.Prompt(name=PROMPT_NAME, title="Task", description=description)
        return types.ListPromptsResult(prompts=[prompt], ttl_ms=0, cache_scope="private")

    async def _get_prompt(self, ctx: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
        if params.name != PROMPT_NAME:
            raise MCPError(
                INVALID_PARAMS,
                f"there is no prompt {quoted(params.name)}; the only prompt is {PROMPT_NAME!r}",
            )
        with translate_errors():
            prompt = self._access(ctx).episode.prompt
        text = types.TextContent(type="text", text=prompt.instructions)
        return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=text)])


def _reject_sessionless(ctx: Context) -> HandlerResult:
    """Answer a sessionless request where the session is the episode; except discovery, with MCPError."""
    # SDK clients in `auto` mode send `server/discover` first. An answer that names only revisions with a
    # handshake makes them fall back to `initialize`.
    supported = list(HANDSHAKE_PROTOCOL_VERSIONS)
    if ctx.method == "server/discover":
        result: JsonObject = {"supportedVersions": supported, "capabilities": {"tools": {}, "prompts": {}}}
        return with_envelope(result, ctx.protocol_version, cacheable=True)
    raise MCPError(
        UNSUPPORTED_PROTOCOL_VERSION,
        "at this address an MCP session is an episode: use a protocol revision with a handshake, or start an "
        "episode at /mcp and use its own address",
        {"supported": supported, "requested": ctx.protocol_version},
    )


def _session_of(ctx: Context) -> Connection | None:
    return None if is_sessionless(ctx.protocol_version) else connection_of(ctx)
