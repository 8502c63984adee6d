"""The lobby: episodes by explicit handles, for clients of every revision, and for people.

With a handshake, the tools of the episode that a session started last appear in its own list as well.
"""

from __future__ import annotations

import json
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
from decathlon_mcp.protocol import relay
from decathlon_mcp.protocol.context import Context, connection_of, notify, request_context_of
from decathlon_mcp.protocol.episode_server import call_params, require_initialized, set_level
from decathlon_mcp.protocol.errors import INVALID_PARAMS, TOOL_FAILURES, as_result, translated
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
from decathlon_mcp.protocol.resolvers import episode_address
from decathlon_mcp.protocol.results import enveloped, is_modern
from decathlon_mcp.types import JsonObject, as_object

INSTRUCTIONS = (
    "This server gives you Toolathlon's tasks, each in a fresh sandbox with its own tools. `list_tasks` says "
    "what there is; `start_episode` opens one and gives its handle, its prompt and its tools; use them with "
    "`call_tool` (or by name, where your client shows them); end with `claim_done`"
)
JUDGES_INSTRUCTIONS = f"{INSTRUCTIONS}, then `evaluate` gives the reward."
PLAYERS_INSTRUCTIONS = f"{INSTRUCTIONS}."
CURRENT = "decathlon/current"


class Lobby:
    """`server` is the SDK's."""

    def __init__(self, episodes: EpisodeRegistry) -> None:
        self._episodes = episodes
        self._described = {name: kind.described() for name, kind in LOBBY_TOOLS.items()}
        self.server: Server[Any] = Server(
            "decathlon-mcp",
            version=__version__,
            title="Toolathlon",
            instructions=JUDGES_INSTRUCTIONS,
            on_list_tools=_never,
            on_call_tool=_never,
            get_tool_input_schema=lambda name: None,
        )
        self.server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_level)
        self.server.middleware.append(self._serve)

    async def _serve(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        match ctx.method:
            case "initialize":
                result = as_object(await call_next(ctx)) or {}
                capabilities = as_object(result.get("capabilities")) or {}
                more = {"capabilities": {**capabilities, "tools": {"listChanged": True}}}
                return {**result, **self._instructions(ctx), **more}
            case "server/discover":
                return {**(as_object(await call_next(ctx)) or {}), **self._instructions(ctx)}
            case "tools/list":
                require_initialized(ctx)
                ours = [self._described[name] for name in self._kinds(ctx)]
                tools = {"tools": [*ours, *self._current_tools(ctx)]}
                return enveloped(tools, ctx.protocol_version, keeps=True)
            case "tools/call":
                require_initialized(ctx)
                name, arguments = call_params(ctx)
                return enveloped(await self._call(ctx, name, arguments), ctx.protocol_version)
            case _:
                return await call_next(ctx)

    def _judges(self, ctx: Context) -> bool:
        return may_evaluate(self._episodes.reward_policy, request_context_of(ctx).principal)

    def _instructions(self, ctx: Context) -> JsonObject:
        return {"instructions": JUDGES_INSTRUCTIONS if self._judges(ctx) else PLAYERS_INSTRUCTIONS}

    def _kinds(self, ctx: Context) -> dict[str, type[LobbyTool]]:
        """The lobby's tools that this caller may use."""
        if self._judges(ctx):
            return LOBBY_TOOLS
        return {name: kind for name, kind in LOBBY_TOOLS.items() if kind is not Evaluate}

    def _current(self, ctx: Context) -> EpisodeAccess | None:
        return connection_of(ctx).state.get(CURRENT)

    def _current_tools(self, ctx: Context) -> list[JsonObject]:
        """The tools of the episode started last, but for those the lobby has itself."""
        access = self._current(ctx)
        if access is None or access.episode.tool_session is None:
            return []
        toolbox = access.episode.tool_session.router
        ours = {toolbox.claim_name, *LOBBY_TOOLS}
        return [tool for tool in toolbox.tools if tool["name"] not in ours]

    async def _call(self, ctx: Context, name: str, arguments: JsonObject | None) -> JsonObject:
        with translated():
            kinds = self._kinds(ctx)
            kind = kinds.get(name)
            if kind is None:
                current = self._current(ctx)
                if current is None:
                    known = ", ".join(kinds)
                    raise MCPError(
                        INVALID_PARAMS, f"there is no tool {name!r} in the lobby; there are {known}"
                    )
                with current.episode.hold():
                    return await relay.call_tool(current, ctx, name, arguments)
            try:
                return await self._answer(ctx, kind.parsed(arguments))
            except DecathlonError as error:
                if error.code in TOOL_FAILURES:
                    return as_result(error)
                raise

    async def _answer(self, ctx: Context, asked: object) -> JsonObject:
        match asked:
            case ListTasks():
                return self._list_tasks(ctx, asked)
            case StartEpisode():
                return await self._start(ctx, asked)
            case ListEpisodes():
                mine = self._episodes.owned_by(self._caller(ctx))
                return _structured({"episodes": [_status(episode) for episode in mine]})
            case EpisodeStatus():
                with (access := self._find(ctx, asked.episode)).episode.hold():
                    return _structured(_status(access.episode))
            case ListTools():
                with (access := self._find(ctx, asked.episode)).episode.hold():
                    return _structured(await relay.list_tools(access, ctx))
            case CallTool():
                with (access := self._find(ctx, asked.episode)).episode.hold():
                    return await relay.call_tool(access, ctx, asked.name, asked.arguments)
            case ClaimDone():
                return await self._claim(self._find(ctx, asked.episode), asked)
            case Evaluate():
                _require_judge(access := self._find(ctx, asked.episode), "evaluate it")
                with access.episode.hold():
                    return await relay.evaluate(access.episode, ctx)
            case CloseEpisode():
                (episode := self._find(ctx, asked.episode).episode).close()
                return _structured({"episode": episode.id, "closed": True})
            case _:
                raise AssertionError(asked)

    def _list_tasks(self, ctx: Context, asked: ListTasks) -> JsonObject:
        catalogue = self._episodes.catalogue
        if asked.sample is None:
            names = [name for name, _, _ in filter_tasks(catalogue, asked)]
        else:
            names = self._episodes.draws.take(
                asked, token=request_context_of(ctx).principal.token, count=asked.sample
            )
        tasks = list_tasks(catalogue, names, prompts=asked.prompts)
        lines = [
            f"{task['id']}: {', '.join(task['servers'])}{'' if task['runnable'] else ' (cannot run here)'}"
            for task in tasks
        ]
        return _structured({"tasks": tasks}, text="\n".join(lines) or "There is no such task.")

    async def _start(self, ctx: Context, asked: StartEpisode) -> JsonObject:
        principal = self._caller(ctx)
        task = asked.task or self._episodes.draw(asked, principal)
        episode = self._episodes.start(
            task, principal, launch_time=asked.launch_time, policy=asked.policy, max_calls=asked.max_calls
        )
        access = EpisodeAccess.by_handle(episode, principal)
        told: JsonObject = {
            "episode": episode.id,
            "task": episode.task_name,
            "address": episode_address(ctx, episode.id),
            "agent": episode.agent_id,
            "agent_address": episode_address(ctx, episode.agent_id),
            "policy": episode.policy,
            "phase": str(episode.state.phase),
            "prompt": episode.prompt.instructions,
            "lease_seconds": self._episodes.idle_seconds,
            **({} if asked.wait else _waiting(episode)),
        }
        if asked.wait:
            with episode.hold():
                told |= await self._ready(ctx, access)
        if not is_modern(ctx.protocol_version):
            connection_of(ctx).state[CURRENT] = access
            await notify(ctx, "notifications/tools/list_changed", {}, with_reply=False)
        names = "".join(f"\n- {tool['name']}" for tool in told.get("tools", []))
        text = f"Episode {episode.id} of {task} is {told['phase']}.\n\n{told['prompt']}"
        return _structured(told, text=f"{text}\n\nIts tools:{names}" if names else text)

    async def _ready(self, ctx: Context, access: EpisodeAccess) -> JsonObject:
        """Phase and tools. Who gives up waiting has no handle, so the episode goes too."""
        try:
            tools = await relay.list_tools(access, ctx)
        except BaseException:
            access.episode.close()
            raise
        return {**tools, "phase": str(access.episode.state.phase)}

    async def _claim(self, access: EpisodeAccess, asked: ClaimDone) -> JsonObject:
        if asked.truncated or asked.turns is not None:
            _require_judge(access, "say how long its agent took, or that it was cut short")
        with access.episode.hold():
            first = await access.episode.claim_done(
                asked.answer, truncated=asked.truncated, turns=asked.turns
            )
        return relay.claimed(access, first)

    def _caller(self, ctx: Context) -> Principal:
        principal, connection = request_context_of(ctx).principal, connection_of(ctx)
        session = connection.session_id or (None if is_modern(ctx.protocol_version) else str(id(connection)))
        return Principal(token=principal.token, role=principal.role, session=session or principal.session)

    def _find(self, ctx: Context, handle: str | None) -> EpisodeAccess:
        if handle is not None:
            principal = self._caller(ctx)
            return EpisodeAccess.by_handle(self._episodes.find(handle, principal), principal)
        if (current := self._current(ctx)) is not None:
            return current
        if is_modern(ctx.protocol_version):
            raise BadRequestError("`episode` is needed: this revision of MCP has no session to remember one")
        raise UnknownEpisodeError("this session has started no episode; start one, or give `episode`")


def _require_judge(access: EpisodeAccess, what: str) -> None:
    if not access.can_evaluate:
        raise AccessDeniedError(f"this episode is its controller's: only a controller's token may {what}")


def _status(episode: Episode) -> JsonObject:
    state = episode.state
    return {
        "episode": episode.id,
        "task": episode.task_name,
        "phase": str(state.phase),
        "policy": episode.policy,
        "calls": episode.calls,
        "started_at": episode.started_at,
        "claimed": episode.claim is not None,
        **_waiting(episode),
        **({"ending": str(state.ending)} if state.phase is Phase.ENDED else {}),
        **({"cause": state.cause.message} if state.cause else {}),
    }


def _waiting(episode: Episode) -> JsonObject:
    waits_for = episode.waiting_for
    return {} if waits_for is None else {"waits_for": waits_for}


def _structured(value: JsonObject, *, text: str | None = None) -> JsonObject:
    said = json.dumps(value, ensure_ascii=False, default=str) if text is None else text
    return {"content": [{"type": "text", "text": said}], "structuredContent": value, "isError": False}


async def _never(ctx: Context, params: object) -> Any:
    raise RuntimeError("tools are answered before the SDK's handlers are reached")
