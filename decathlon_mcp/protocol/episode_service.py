"""The service for one episode: of the address, of the process, or that the session is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from decathlon_mcp.episodes.episode import EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.episodes.tools.offered import OfferedTools
from decathlon_mcp.errors import EpisodeEndedError, UnknownEpisodeError
from decathlon_mcp.foreign_names import quoted
from decathlon_mcp.protocol.episode_tools import (
    EVALUATE,
    answer_is_lost,
    call_tool,
    list_tools,
    tools_after_end,
)
from decathlon_mcp.protocol.messages import (
    GET_PROMPT,
    HANDSHAKE_VERSIONS,
    INVALID_PARAMS,
    LIST_PROMPTS,
    UNSUPPORTED_VERSION,
    Kind,
    McpError,
)
from decathlon_mcp.protocol.requests import (
    Request,
    RequestContext,
    Result,
    Service,
    episode_address,
    page_address,
)
from decathlon_mcp.types import JsonObject, as_json

EPISODE_KEY = "decathlon/episode"
PROMPT_NAME = "task"
_PROMPT = {
    "name": PROMPT_NAME,
    "title": "Task",
    "description": "The task: what to do, where, and how to finish.",
}
HEADER_MARKER = b"x-mcp-header"
"""What is in the schema of a tool some of whose arguments must be repeated in headers."""
LISTEN = "subscriptions/listen"
NO_CALLS = (
    "This MCP session made no tool call before `evaluate`. If you did make calls, your client opens a "
    "session for each of them, and at a task's address every session is an episode of its own. Start an "
    "episode in the lobby, /mcp, with `start_episode`, and connect to the address that it returns."
)


class EpisodeService(Service):
    """Serves the tools and the prompt of an episode to clients with access to it."""

    methods = Service.methods | {LIST_PROMPTS, GET_PROMPT}
    capabilities: JsonObject = {  # noqa: RUF012  (never changed)
        "logging": {},
        "tools": {"listChanged": False},
        "prompts": {"listChanged": False},
    }

    def __init__(self, registry: EpisodeRegistry) -> None:
        super().__init__(registry.spans)
        self._with_headers: WeakKeyDictionary[OfferedTools, Mapping[str, Any]] = WeakKeyDictionary()

    def _access(self, request: Request) -> EpisodeAccess:
        """Access to the request's episode. Raises DecathlonError."""
        if request.context.access is None:
            raise UnknownEpisodeError("this session has no episode: initialize a new session")
        return request.context.access

    def _open(self, request: Request) -> EpisodeAccess:
        """Access for a session that is being initialized; may start an episode. Raises DecathlonError."""
        return self._access(request)

    async def initialize(self, request: Request) -> JsonObject:
        access = self._open(request)
        episode, base_url = access.episode, request.context.base_url
        info: JsonObject = {
            "id": access.id,
            "public_id": episode.public_id,
            "page": page_address(base_url, episode.public_id, has_page=request.context.has_page),
            "task": episode.spec.task_name,
            "phase": str(episode.state.phase),
            "address": episode_address(base_url, access.id),
        }
        if episode.waits_for is not None:
            info["waits_for"] = episode.waits_for
        return {"instructions": episode.prompt.instructions, "_meta": {EPISODE_KEY: info}}

    async def discover(self, request: Request) -> JsonObject:
        instructions = self._access(request).episode.prompt.instructions
        return {**await super().discover(request), "instructions": instructions}

    async def serve(self, request: Request) -> Result:
        match request.method:
            case "tools/list":
                return await self._list_tools(request)
            case "tools/call":
                return await self._call_tool(request)
            case "prompts/list":
                return {"prompts": [_PROMPT]}
            case _:
                return self._get_prompt(request)

    async def serve_again(self, request: Request, kind: Kind, agent: str) -> Result:
        del agent  # the address names the episode
        match kind:
            case Kind.LIST:
                return await self._list_tools(request)
            case Kind.EVALUATE:
                request.name = EVALUATE
                return await self._call_tool(request)
            case Kind.CALL | Kind.CLAIM:
                return await call_tool(self._access(request), request, again=kind)
            case _:
                raise answer_is_lost()

    async def _call_tool(self, request: Request) -> Result:
        return await call_tool(self._access(request), request)

    async def _list_tools(self, request: Request) -> JsonObject:
        access = self._access(request)
        episode = access.episode
        if episode.state.phase is Phase.ENDED and (episode.was_ready or episode.verdict is not None):
            names = episode.sandbox_factory.tool_names
            return tools_after_end(names, can_evaluate=access.can_evaluate)
        await request.accepted(Kind.LIST)
        return await list_tools(access, request)

    def _get_prompt(self, request: Request) -> JsonObject:
        name = request.params.name
        if name != PROMPT_NAME:
            shown = quoted(name) if isinstance(name, str) else "without a name"
            raise McpError(INVALID_PARAMS, f"there is no prompt {shown}; the only prompt is {PROMPT_NAME!r}")
        text = {"type": "text", "text": self._access(request).episode.prompt.instructions}
        return {"messages": [{"role": "user", "content": text}]}

    def schema_with_headers(self, context: RequestContext, tool: str) -> Mapping[str, Any] | None:
        offered = None if context.access is None else context.access.episode.tools.offered
        if offered is None:
            return None
        if (schemas := self._with_headers.get(offered)) is None:
            tools = ((each["name"], each["inputSchema"]) for each in offered.evaluator_tools)
            schemas = {name: schema for name, schema in tools if HEADER_MARKER in as_json(schema)}
            self._with_headers[offered] = schemas
        return schemas.get(tool)


class TaskService(EpisodeService):
    """For `/tasks/{id}/mcp`: the session is the episode, which `initialize` starts."""

    ends_with_session = True

    def __init__(self, registry: EpisodeRegistry) -> None:
        super().__init__(registry)
        self._registry = registry

    def _access(self, request: Request) -> EpisodeAccess:
        if request.context.access is None:
            raise EpisodeEndedError("the episode of this session is over: initialize a new session")
        return request.context.access

    def _open(self, request: Request) -> EpisodeAccess:
        context = request.context
        if context.access is None:
            if context.task_id is None:
                return self._access(request)
            episode = self._registry.start(context.task_id, context.principal, labels=context.labels)
            context.add_started(episode)
            context.access = EpisodeAccess.by_session(episode, context.principal)
        return context.access

    async def _list_tools(self, request: Request) -> JsonObject:
        if request.context.access is None:
            # A session of an earlier server, whose episode this one does not know.
            return tools_after_end("decathlon", can_evaluate=True)
        return await super()._list_tools(request)

    async def _call_tool(self, request: Request) -> Result:
        episode = self._access(request).episode
        is_untouched = episode.calls.sent == 0 and episode.claim is None
        result = await super()._call_tool(request)
        if (
            request.name != EVALUATE
            or not is_untouched
            or episode.verdict is None
            or not isinstance(result, dict)
        ):
            return result
        first, *others = result["content"]
        return {**result, "content": [first, {"type": "text", "text": NO_CALLS}, *others]}

    async def discover(self, request: Request) -> JsonObject:
        # SDK clients in `auto` mode send `server/discover` first. An answer that names only revisions with a
        # handshake makes them fall back to `initialize`.
        capabilities: JsonObject = {"tools": {}, "prompts": {}}
        return {"supportedVersions": list(HANDSHAKE_VERSIONS), "capabilities": capabilities}

    async def _respond(self, request: Request) -> Result:
        if request.session is not None or request.method not in {*self.methods, LISTEN}:
            return await super()._respond(request)
        raise McpError(
            UNSUPPORTED_VERSION,
            "at this address an MCP session is an episode: use a protocol revision with a handshake, or "
            "start an episode at /mcp and use its own address",
            {"supported": list(HANDSHAKE_VERSIONS), "requested": request.version},
        )
