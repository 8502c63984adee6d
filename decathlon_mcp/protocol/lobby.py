"""The lobby: episodes by explicit handle, for clients of every revision.

In sessions, the tools of the episode that the session started last are listed next to the lobby's own.
"""

from __future__ import annotations

from typing import Any

import mcp_types as types
from mcp.server.context import CallNext, HandlerResult
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from decathlon_mcp import __version__
from decathlon_mcp.catalogue.draws import filter_tasks
from decathlon_mcp.catalogue.listing import list_tasks
from decathlon_mcp.episodes.access import Principal, may_evaluate
from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import AccessDeniedError, BadRequestError, DecathlonError, UnknownEpisodeError
from decathlon_mcp.foreign_names import quoted
from decathlon_mcp.protocol import relay
from decathlon_mcp.protocol.context import base_url_of, request_context_of
from decathlon_mcp.protocol.episode_server import (
    call_params,
    require_initialized,
    set_log_level,
    unreachable_handler,
)
from decathlon_mcp.protocol.limits import check_request
from decathlon_mcp.protocol.lobby_tools import (
    LOBBY_TOOLS,
    CallTool,
    ClaimDone,
    CloseEpisode,
    EpisodeStatus,
    Evaluate,
    ListEpisodes,
    ListTasks,
    ListTools,
    LobbyTool,
    StartEpisode,
)
from decathlon_mcp.protocol.progress import Progress
from decathlon_mcp.protocol.results import (
    ARGUMENT_FAULTS,
    INVALID_PARAMS,
    TOOL_FAILURES,
    claim_result,
    error_result,
    is_sessionless,
    structured_result,
    translate_errors,
    with_envelope,
)
from decathlon_mcp.protocol.sdk import Context, connection_of, notify_tools_changed
from decathlon_mcp.protocol.starting import describe_start, start_episode
from decathlon_mcp.protocol.tool_changes import CURRENT_KEY, listen_for_changes, with_changing_tools
from decathlon_mcp.types import JsonObject, as_object

INSTRUCTIONS = (
    "This server runs Toolathlon's tasks, each in a new sandbox with its own tools. `list_tasks` lists the "
    "tasks. `start_episode` starts one and returns its handle, its prompt and its tools. Call these tools "
    "with `call_tool`, or by their names if your client lists them. End with `claim_done`"
)
EVALUATOR_INSTRUCTIONS = f"{INSTRUCTIONS}, then call `evaluate` for the reward."
PLAYER_INSTRUCTIONS = f"{INSTRUCTIONS}."


class Lobby:
    """Serves the lobby's tools. `server` is the SDK's server."""

    def __init__(self, registry: EpisodeRegistry) -> None:
        self._registry = registry
        self._definitions = {name: tool.definition() for name, tool in LOBBY_TOOLS.items()}
        self.server: Server[Any] = Server(
            "decathlon-mcp",
            version=__version__,
            title="Toolathlon",
            instructions=EVALUATOR_INSTRUCTIONS,
            on_list_tools=unreachable_handler,
            on_call_tool=unreachable_handler,
            # No lobby tool takes arguments from HTTP headers, so there is nothing for the SDK to check.
            get_tool_input_schema=lambda name: None,
        )
        self.server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_log_level)
        self.server.middleware.append(self._serve)

    async def _serve(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        if ctx.request_id is None:
            return await call_next(ctx)  # a notification, also with the method of a request
        check_request(ctx)
        match ctx.method:
            case "initialize":
                result = as_object(await call_next(ctx)) or {}
                return {**with_changing_tools(result), "instructions": self._instructions(ctx)}
            case "server/discover":
                result = as_object(await call_next(ctx)) or {}
                return {**result, "instructions": self._instructions(ctx)}
            case "tools/list":
                require_initialized(ctx)
                lobby_tools = [self._definitions[name] for name in self._allowed_tools(ctx)]
                result = {"tools": [*lobby_tools, *self._current_tools(ctx)]}
                return with_envelope(result, ctx.protocol_version, cacheable=True)
            case "tools/call":
                require_initialized(ctx)
                name, arguments = call_params(ctx)
                return with_envelope(await self._call(ctx, name, arguments), ctx.protocol_version)
            case _:
                return await call_next(ctx)

    def _can_evaluate(self, ctx: Context) -> bool:
        return may_evaluate(self._registry.reward_policy, request_context_of(ctx).principal)

    def _instructions(self, ctx: Context) -> str:
        return EVALUATOR_INSTRUCTIONS if self._can_evaluate(ctx) else PLAYER_INSTRUCTIONS

    def _allowed_tools(self, ctx: Context) -> dict[str, type[LobbyTool]]:
        """The lobby's tools that this client can use."""
        if self._can_evaluate(ctx):
            return LOBBY_TOOLS
        return {name: tool for name, tool in LOBBY_TOOLS.items() if tool is not Evaluate}

    def _current(self, ctx: Context) -> EpisodeAccess | None:
        """Access to the episode that this session started last."""
        return connection_of(ctx).state.get(CURRENT_KEY)

    def _current_tools(self, ctx: Context) -> list[JsonObject]:
        """The tools of the current episode, except those with the name of a lobby tool."""
        access = self._current(ctx)
        router = None if access is None else access.episode.current_router
        if access is None or router is None or access.episode.requested_ending is not None:
            return []
        # `claim_name` can be spelled differently from the lobby's `claim_done`, which does the same.
        excluded = {router.claim_name, *LOBBY_TOOLS}
        return [tool for tool in router.tools if tool["name"] not in excluded]

    async def _call(self, ctx: Context, name: str, arguments: JsonObject | None) -> JsonObject:
        with translate_errors():
            allowed = self._allowed_tools(ctx)
            tool = allowed.get(name)
            if tool is None:
                return await self._call_current(ctx, name, arguments, allowed)
            try:
                return await self._answer(ctx, tool.from_arguments(arguments))
            except DecathlonError as error:
                if error.code in TOOL_FAILURES | ARGUMENT_FAULTS:
                    return error_result(error)
                raise

    async def _call_current(
        self, ctx: Context, name: str, arguments: JsonObject | None, allowed: dict[str, type[LobbyTool]]
    ) -> JsonObject:
        """Call a tool of the current episode by its own name."""
        access = self._current(ctx)
        if access is None:
            raise MCPError(
                INVALID_PARAMS,
                f"there is no tool {quoted(name)} in the lobby; its tools are {', '.join(allowed)}",
            )
        with access.episode.hold():
            return await relay.call_tool(access, ctx, name, arguments)

    async def _answer(self, ctx: Context, call: LobbyTool) -> JsonObject:
        match call:
            case ListTasks():
                return self._list_tasks(ctx, call)
            case StartEpisode():
                return await self._start(ctx, call)
            case ListEpisodes():
                episodes = self._registry.owned_by(self._principal(ctx))
                return structured_result({"episodes": [_status(episode) for episode in episodes]})
            case EpisodeStatus():
                with (access := self._find(ctx, call.episode)).episode.hold():
                    return structured_result(_status(access.episode))
            case ListTools():
                with (access := self._find(ctx, call.episode)).episode.hold():
                    return structured_result(await relay.list_tools(access, ctx))
            case CallTool():
                with (access := self._find(ctx, call.episode)).episode.hold():
                    return await relay.call_tool(access, ctx, call.name, call.arguments)
            case ClaimDone():
                return await self._claim(self._find(ctx, call.episode), call)
            case Evaluate():
                _require_evaluator(access := self._find(ctx, call.episode), "evaluate it")
                with access.episode.hold():
                    return await relay.evaluate(access.episode, Progress(ctx))
            case CloseEpisode():
                return await self._close(ctx, self._find(ctx, call.episode).episode)
            case _:
                raise AssertionError(call)

    def _list_tasks(self, ctx: Context, call: ListTasks) -> JsonObject:
        catalogue = self._registry.catalogue
        if call.sample is None:
            names = [name for name, _, _ in filter_tasks(catalogue, call)]
        else:
            token = request_context_of(ctx).principal.token
            names = self._registry.draws.take(call, token=token, count=call.sample)
        tasks = list_tasks(catalogue, names, prompts=call.prompts)
        return structured_result({"tasks": tasks}, text=None if tasks else "No task matches.")

    async def _start(self, ctx: Context, call: StartEpisode) -> JsonObject:
        principal = self._principal(ctx)
        episode = start_episode(self._registry, call, principal, operation=relay.operation_of(ctx))
        if not relay.has_operation(ctx):
            # A client that chose an operation comes back for the episode on any connection, so that a reply
            # that was not delivered says little; if it does not, the grace or the first use ends the episode.
            request_context_of(ctx).add_started(episode)
        access = EpisodeAccess.by_handle(episode, principal)
        info = describe_start(self._registry, episode, base_url_of(ctx))
        if call.wait:
            with request_context_of(ctx).awaiting(episode):
                info |= await self._wait_until_ready(ctx, access)
        else:
            info |= _waits_for(episode)
        if not is_sessionless(ctx.protocol_version):
            connection_of(ctx).state[CURRENT_KEY] = access
            listen_for_changes(ctx, episode)
            await notify_tools_changed(connection_of(ctx))
        names = "".join(f"\n- {tool['name']}" for tool in info.get("tools", []))
        text = f"Episode {episode.id} of {episode.task_name} is {info['phase']}.\n\n{info['prompt']}"
        return structured_result(info, text=f"{text}\n\nIts tools:{names}" if names else text)

    async def _wait_until_ready(self, ctx: Context, access: EpisodeAccess) -> JsonObject:
        """The episode's tools and its phase."""
        try:
            tools = await relay.list_tools(access, ctx)
        except BaseException:
            # The client does not get a handle, so nobody could use or close the episode.
            access.episode.close()
            raise
        return {**tools, "phase": str(access.episode.state.phase)}

    async def _claim(self, access: EpisodeAccess, call: ClaimDone) -> JsonObject:
        if call.truncated or call.turns is not None:
            _require_evaluator(access, "set `truncated` or `turns`")
        turns = call.turns if access.reports_turns else None
        with access.episode.hold():
            first = await access.episode.claim_done(call.answer, truncated=call.truncated, turns=turns)
        hint = "; `evaluate` gives the verdict" if access.can_evaluate else ""
        ignored_turns = turns != call.turns
        is_graded = access.episode.is_graded
        return claim_result(first=first, is_graded=is_graded, ignored_turns=ignored_turns, hint=hint)

    async def _close(self, ctx: Context, episode: Episode) -> JsonObject:
        episode.close()
        current = self._current(ctx)
        if current is not None and current.episode is episode:
            # Its tools are not listed any more.
            await notify_tools_changed(connection_of(ctx))
        return structured_result({"episode": episode.id, "closed": True})

    def _principal(self, ctx: Context) -> Principal:
        """The request's principal with its session, so that `list_episodes` works without tokens."""
        principal, connection = request_context_of(ctx).principal, connection_of(ctx)
        session = connection.session_id
        if session is None and not is_sessionless(ctx.protocol_version):
            # Over stdio or in memory the connection is the session, and it has no id.
            session = str(id(connection))
        return principal.in_session(session or principal.session)

    def _find(self, ctx: Context, handle: str | None) -> EpisodeAccess:
        """Access by handle, or to the current episode. Raises UnknownEpisodeError, BadRequestError."""
        if handle is not None:
            principal = self._principal(ctx)
            return EpisodeAccess.by_handle(self._registry.find(handle, principal), principal)
        if (current := self._current(ctx)) is not None:
            return current
        if is_sessionless(ctx.protocol_version):
            raise BadRequestError("`episode` is required: this protocol revision has no sessions")
        raise UnknownEpisodeError("this session has started no episode; start one, or give `episode`")


def _require_evaluator(access: EpisodeAccess, action: str) -> None:
    if not access.can_evaluate:
        raise AccessDeniedError(f"this episode is its controller's: only a controller's token may {action}")


def _status(episode: Episode) -> JsonObject:
    state = episode.state
    status: JsonObject = {
        "episode": episode.id,
        "task": episode.task_name,
        "phase": str(state.phase),
        "policy": episode.policy,
        "calls": episode.calls,
        "started_at": episode.started_at,
        "claimed": episode.claim is not None,
        **_waits_for(episode),
    }
    if state.phase is Phase.ENDED:
        status["ending"] = str(state.ending)
    if state.cause:
        status["cause"] = state.cause.message
    return status


def _waits_for(episode: Episode) -> JsonObject:
    return {} if episode.waiting_for is None else {"waits_for": episode.waiting_for}
