"""The lobby: episodes by explicit handle, for clients of every revision.

In sessions, the tools of the episode that the session started last are listed next to the lobby's own.
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio.to_thread

from decathlon_mcp.catalogue.catalogue import list_tasks
from decathlon_mcp.catalogue.draws import filter_tasks, rates_for
from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import BadRequestError, DecathlonError, LimitExceededError, UnknownEpisodeError
from decathlon_mcp.grading.rubric import metrics_of
from decathlon_mcp.labels import merge_labels, read_label_header
from decathlon_mcp.protocol.episode_service import (
    answer_is_lost,
    call_tool,
    claimed_before,
    evaluate,
    list_tools,
    waits_for,
)
from decathlon_mcp.protocol.lobby_tools import (
    AddNote,
    CallTool,
    ClaimDone,
    CloseEpisode,
    EpisodeTool,
    Evaluate,
    EvaluatorTool,
    ListEpisodes,
    ListTasks,
    ListTools,
    LobbyTool,
    StartEpisode,
    describe_start,
    lobby_tools,
    require_evaluator,
)
from decathlon_mcp.protocol.messages import INVALID_PARAMS, LIST, Kind, McpError
from decathlon_mcp.protocol.requests import Request, RequestContext, Result, Service
from decathlon_mcp.protocol.results import (
    ARGUMENT_FAULTS,
    TOOL_FAILURES,
    claim_result,
    error_result,
    structured_result,
)
from decathlon_mcp.types import JsonObject
from decathlon_mcp.validation import one_line, quoted

INSTRUCTIONS = (
    "This server runs Toolathlon's tasks, each in a new sandbox with its own tools. `list_tasks` lists the "
    "tasks. `start_episode` starts one and returns its handle, its prompt and its tools. Call these tools "
    "with `call_tool`, or by their names if your client lists them. End with `claim_done`"
)


class Lobby(Service):
    """Serves the lobby's tools. `labels`: of every episode that it starts."""

    def __init__(self, registry: EpisodeRegistry, *, labels: Mapping[str, str] | None = None) -> None:
        super().__init__(registry)
        self._labels = labels or {}
        self._tools = lobby_tools()

    async def initialize(self, request: Request) -> JsonObject:
        return {"instructions": self._instructions(request.context)}

    async def discover(self, request: Request) -> JsonObject:
        return {**await super().discover(request), "instructions": self._instructions(request.context)}

    async def serve(self, request: Request) -> Result:
        if request.method == LIST:
            return self._list_all_tools(request)
        tool = self._allowed_tools(request).get(request.name)
        if tool is None:
            return await self._call_current(request)
        try:
            if tool.max_bytes is not None and len(request.arguments or b"") > tool.max_bytes:
                raise LimitExceededError(
                    f"the arguments of {tool.tool} have at most {tool.max_bytes:,} bytes"
                )
            return await self._answer(request, tool.from_arguments(request.decoded_arguments()))
        except DecathlonError as error:
            if error.code in TOOL_FAILURES | ARGUMENT_FAULTS:
                return error_result(error)
            raise

    async def serve_again(self, request: Request, kind: Kind, agent: str) -> Result:
        if kind is Kind.LIST:
            return self._list_all_tools(request)
        if kind is Kind.OTHER or not agent:
            raise answer_is_lost()
        access = self._find_by_agent(request, agent)
        with access.episode.lease.hold(use=kind is not Kind.START):
            match kind:
                case Kind.START:
                    request.context.add_started(access.episode)
                    # Its arguments are not known any more. Most wait.
                    return await self._describe(request, access, wait=True)
                case Kind.EVALUATE:
                    require_evaluator(access, "evaluate it")
                    return await evaluate(access.episode, request)
                case Kind.CLAIM:
                    first = await claimed_before(access.episode, request)
                    return self._claim_result(access, first=first)
                case _:
                    return await call_tool(access, request, again=kind)

    def _list_all_tools(self, request: Request) -> JsonObject:
        lobby_tools = (tool.definition() for tool in self._allowed_tools(request).values())
        return {"tools": [*lobby_tools, *self._current_tools(request)]}

    def _can_evaluate(self, context: RequestContext) -> bool:
        return context.principal.may_evaluate(self._registry.options.reward_policy)

    def _instructions(self, context: RequestContext) -> str:
        end = ", then call `evaluate` for the reward." if self._can_evaluate(context) else "."
        return f"{INSTRUCTIONS}{end}"

    def _allowed_tools(self, request: Request) -> Mapping[str, type[LobbyTool]]:
        """The lobby's tools that this client can use."""
        if self._can_evaluate(request.context):
            return self._tools
        return {name: tool for name, tool in self._tools.items() if tool is not Evaluate}

    def _current(self, request: Request) -> EpisodeAccess | None:
        """Access to the episode that this session started last."""
        return None if request.session is None else request.session.access

    def _current_tools(self, request: Request) -> list[JsonObject]:
        """The tools of the current episode, except tools with the name of a lobby tool."""
        access = self._current(request)
        offered = None if access is None else access.episode.tools.offered
        if access is None or offered is None or access.episode.records.progress.requested_ending is not None:
            return []
        # `claim_name` can be spelled differently from the lobby's `claim_done`, which does the same.
        excluded = {offered.claim_name, *self._tools}
        return [tool for tool in offered.tools if tool["name"] not in excluded]

    async def _call_current(self, request: Request) -> Result:
        """Call a tool of the current episode by its own name."""
        access = self._current(request)
        if access is None:
            raise McpError(
                INVALID_PARAMS,
                f"there is no tool {quoted(request.name)} in the lobby; its tools are "
                f"{', '.join(self._allowed_tools(request))}",
            )
        with access.episode.lease.hold():
            return await call_tool(access, request, agent=access.episode.spec.agent_id)

    async def _answer(self, request: Request, call: LobbyTool) -> Result:
        match call:
            case ListTasks():
                return await self._list_tasks(request, call)
            case StartEpisode():
                return await self._start(request, call)
            case ListEpisodes():
                episodes = self._registry.owned_by(self._principal(request))
                listed = [
                    {**_status(episode), "labels": dict(episode.spec.labels)}
                    for episode in episodes
                    if call.selects(episode.spec.labels)
                ]
                return structured_result({"episodes": listed})
            case ListTools(task=str(task)):
                suite, known = self._registry.catalogue.find(task)
                lists = self._registry.factory(suite.name).tool_lists
                tools = None if lists is None else await lists.known(known)
                return structured_result({"tools": tools})
            case ListTools() | ClaimDone() | Evaluate() | EpisodeTool():
                access = self._find(request, call.episode)
                if isinstance(call, CloseEpisode):
                    return await self._close(request, access.episode, call.reason)
                with access.episode.lease.hold(use=not isinstance(call, AddNote)):
                    return await self._answer_for(access, request, call)
            case _:
                raise AssertionError(call)

    async def _answer_for(self, access: EpisodeAccess, request: Request, call: LobbyTool) -> Result:
        """Serve a tool about an episode."""
        episode = access.episode
        match call:
            case ListTools():
                await request.accepted(Kind.OTHER)
                return structured_result(await list_tools(access, request))
            case CallTool():
                request.name, request.arguments = call.name, CallParams.of(call.arguments).arguments
                return await call_tool(access, request, agent=episode.spec.agent_id)
            case ClaimDone():
                return await self._claim(request, access, call)
            case Evaluate():
                require_evaluator(access, "evaluate it")
                await request.accepted(Kind.EVALUATE, agent=episode.spec.agent_id)
                return await evaluate(episode, request)
            case AddNote():
                episode.add_note(call.text, role=call.role, usage=call.usage, calls=call.calls)
                return structured_result({"added": True})
            case EvaluatorTool():
                require_evaluator(access, call.action)
                await request.accepted(Kind.OTHER)
                return structured_result(await call.run(self._registry, episode))
            case _:
                return structured_result(_status(episode))

    async def _list_tasks(self, request: Request, call: ListTasks) -> JsonObject:
        catalogue = self._registry.catalogue
        token = request.context.principal.token
        rates = rates_for(catalogue, call, token)
        if call.sample is None:
            names = [name for name, _, _ in filter_tasks(catalogue, call, rates)]
        else:
            names = self._registry.draws.take(call, token=token, count=call.sample)
        metrics = await anyio.to_thread.run_sync(metrics_of, catalogue, names)
        tasks = list_tasks(catalogue, names, prompts=call.prompts, metrics=metrics, rates=rates)
        return structured_result({"tasks": tasks}, text=None if tasks else "No task matches.")

    async def _start(self, request: Request, call: StartEpisode) -> JsonObject:
        principal = self._principal(request)
        labels = merge_labels(self._labels, read_label_header(request.context.label_header))
        episode = await call.start(self._registry, principal, operation=request.operation, labels=labels)
        await request.accepted(Kind.START, agent=episode.spec.agent_id)
        if request.operation is None:
            # A client that chose an operation comes back for the episode on any connection, so that a reply
            # that was not delivered says little; if it does not, the grace or the first use ends the episode.
            request.context.add_started(episode)
        return await self._describe(request, EpisodeAccess.by_handle(episode, principal), wait=call.wait)

    async def _describe(self, request: Request, access: EpisodeAccess, *, wait: bool) -> JsonObject:
        """The result of `start_episode`. `wait`: until the tools can be called."""
        episode = access.episode
        context = request.context
        info = describe_start(self._registry, episode, context.base_url, has_page=context.has_page)
        if wait:
            with context.awaiting(episode):
                info |= await self._wait_until_ready(request, access)
        else:
            info |= waits_for(episode)
        if (session := request.session) is not None:
            session.access = access
            session.save()
            session.announce_tools()
        names = "".join(f"\n- {tool['name']}" for tool in info.get("tools", []))
        text = f"Episode {episode.id} of {episode.spec.task_name} is {info['phase']}.\n\n{info['prompt']}"
        return structured_result(info, text=f"{text}\n\nIts tools:{names}" if names else text)

    async def _wait_until_ready(self, request: Request, access: EpisodeAccess) -> JsonObject:
        """The episode's tools and its phase."""
        try:
            tools = await list_tools(access, request)
        except BaseException:
            if request.operation is None and not request.is_replaced:
                # The client does not get a handle, so nobody could use or close the episode.
                access.episode.close()
            raise
        # The number of differences is known now.
        return {**tools, "phase": str(access.episode.state.phase), **access.episode.reported}

    async def _claim(self, request: Request, access: EpisodeAccess, call: ClaimDone) -> JsonObject:
        if call.truncated or call.turns is not None:
            require_evaluator(access, "set `truncated` or `turns`")
        turns = call.turns if access.reports_turns else None
        await request.accepted(Kind.CLAIM, agent=access.episode.spec.agent_id)
        first = await access.episode.claim_done(
            call.answer, truncated=call.truncated, turns=turns, operation=request.last_key
        )
        return self._claim_result(access, first=first, ignored_turns=turns != call.turns)

    def _claim_result(self, access: EpisodeAccess, *, first: bool, ignored_turns: bool = False) -> JsonObject:
        hint = "; `evaluate` gives the verdict" if access.can_evaluate else ""
        is_graded = access.episode.is_graded
        return claim_result(first=first, is_graded=is_graded, ignored_turns=ignored_turns, hint=hint)

    async def _close(self, request: Request, episode: Episode, reason: str | None) -> JsonObject:
        episode.close(reason=one_line(reason or ""))
        current = self._current(request)
        if current is not None and current.episode is episode and request.session is not None:
            # Its tools are not listed any more.
            request.session.announce_tools()
        return structured_result({"episode": episode.id, "closed": True})

    def _principal(self, request: Request) -> Principal:
        """The request's principal with its session, so that `list_episodes` works without tokens."""
        principal, session = request.context.principal, request.session
        return principal.in_session(principal.session if session is None else session.owner)

    def _find(self, request: Request, handle: str | None) -> EpisodeAccess:
        """Access by handle, or to the current episode. Raises UnknownEpisodeError, BadRequestError."""
        if handle is not None:
            principal = self._principal(request)
            return EpisodeAccess.by_handle(self._registry.find(handle, principal), principal)
        if (current := self._current(request)) is not None:
            return current
        if request.session is None:
            raise BadRequestError("`episode` is required: this protocol revision has no sessions")
        raise UnknownEpisodeError("this session has started no episode; start one, or give `episode`")

    def _find_by_agent(self, request: Request, agent: str) -> EpisodeAccess:
        """Access to the episode with this agent's id, as by its handle, for its owner alone.

        An agent knows that id too, and can write it into an event's. Raises UnknownEpisodeError.
        """
        access = self._registry.agent_access(agent)
        if access is None or not self._principal(request).owns(access.episode.spec.owner):
            raise UnknownEpisodeError("there is no such episode")
        return self._find(request, access.episode.id)


def _status(episode: Episode) -> JsonObject:
    state = episode.state
    status: JsonObject = {
        "episode": episode.id,
        "public_id": episode.public_id,
        "task": episode.spec.task_name,
        "phase": str(state.phase),
        "policy": episode.spec.policy,
        "calls": episode.calls.sent,
        "started_at": episode.started_at,
        "claimed": episode.claim is not None,
        "launch_time": episode.spec.launch_time.isoformat(),
        "language": episode.sandbox_factory.suite.language,
        "names": episode.sandbox_factory.tool_names,
        "suite_revision": episode.records.progress.facts.suite_revision or None,
        **episode.reported,
        **waits_for(episode),
    }
    if state.phase is Phase.ENDED:
        status["ending"] = str(state.ending)
    if state.cause:
        status["cause"] = state.cause.message
    return status
