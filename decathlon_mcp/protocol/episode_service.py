"""The service for one episode, and an episode's tools over MCP, which the lobby serves too."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import anyio

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver.replies import Reply
from decathlon_mcp.episodes.call import Call
from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.episodes.state import NOT_READY, Phase
from decathlon_mcp.episodes.tools.offered import claim_name, claim_tool, evaluate_tool
from decathlon_mcp.errors import (
    BadRequestError,
    DecathlonError,
    EpisodeEndedError,
    UnansweredError,
    UnknownEpisodeError,
)
from decathlon_mcp.protocol.messages import (
    CALL,
    GET_PROMPT,
    HANDSHAKE_VERSIONS,
    INVALID_PARAMS,
    LIST,
    LIST_PROMPTS,
    READY_KEY,
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
from decathlon_mcp.protocol.results import (
    ARGUMENT_FAULTS,
    TOOL_FAILURES,
    claim_result,
    error_result,
    verdict_result,
)
from decathlon_mcp.types import JsonObject, Names, json_kind
from decathlon_mcp.validation import MAX_NAME_CHARACTERS, quoted

EPISODE_KEY = "decathlon/episode"
"""Key in the `_meta` of the result of `initialize`, and of a `notifications/cancelled` at the lobby."""
EVALUATE = "evaluate"
PROMPT_NAME = "task"
_PROMPT = {
    "name": PROMPT_NAME,
    "title": "Task",
    "description": "The task: what to do, where, and how to finish.",
}
LISTEN = "subscriptions/listen"
NO_CALLS = (
    "This MCP session made no tool call before `evaluate`. If you did make calls, your client opens a "
    "session for each of them, and at a task's address every session is an episode of its own. Start an "
    "episode in the lobby, /mcp, with `start_episode`, and connect to the address that it returns."
)
MAX_UNKNOWN_SHOWN = 5
"""Unknown arguments that an error message names."""
CLAIM_SECONDS = 1.0
"""How long after the set-up a claim that waited for it is made at the latest."""
PROGRESS_SECONDS = 5.0
"""Time between two progress notifications while a client waits."""
WAITING_UNIT = 1e-6
"""Progress per second of a wait before a tool's call: below anything that a tool reports, except 0."""


class EpisodeService(Service):
    """Serves the tools and the prompt of an episode to clients with access to it."""

    methods = Service.methods | {LIST_PROMPTS, GET_PROMPT}
    capabilities: JsonObject = {  # noqa: RUF012  (never changed)
        "logging": {},
        "tools": {"listChanged": False},
        "prompts": {"listChanged": False},
    }

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
            **waits_for(episode),
        }
        return {"instructions": episode.prompt.instructions, "_meta": {EPISODE_KEY: info}}

    async def discover(self, request: Request) -> JsonObject:
        instructions = self._access(request).episode.prompt.instructions
        return {**await super().discover(request), "instructions": instructions}

    async def serve(self, request: Request) -> Result:
        if request.method == CALL:
            return await call_tool(self._access(request), request)
        if request.method == LIST:
            return await self._list_tools(request)
        if request.method == LIST_PROMPTS:
            return {"prompts": [_PROMPT]}
        name = request.params.name
        if name != PROMPT_NAME:
            shown = quoted(name) if isinstance(name, str) else "without a name"
            raise McpError(INVALID_PARAMS, f"there is no prompt {shown}; the only prompt is {PROMPT_NAME!r}")
        text = {"type": "text", "text": self._access(request).episode.prompt.instructions}
        return {"messages": [{"role": "user", "content": text}]}

    async def serve_again(self, request: Request, kind: Kind, agent: str) -> Result:
        # The address names the episode, not `agent`.
        match kind:
            case Kind.LIST:
                # Perhaps it was to wait until the episode is ready; its `_meta` is not known any more.
                request.meta = {**request.meta, READY_KEY: True}
                return await self._list_tools(request)
            case Kind.EVALUATE:
                request.name = EVALUATE
                return await self.serve(request)
            case Kind.CALL | Kind.CLAIM:
                return await call_tool(self._access(request), request, again=kind)
            case _:
                raise answer_is_lost()

    async def _list_tools(self, request: Request) -> JsonObject:
        access = self._access(request)
        episode = access.episode
        if episode.state.phase is Phase.ENDED and (episode.was_ready or episode.verdict is not None):
            names = episode.sandbox_factory.tool_names
            return tools_after_end(names, can_evaluate=access.can_evaluate)
        await request.accepted(Kind.LIST)
        return await list_tools(access, request)

    def schema_with_headers(self, context: RequestContext, tool: str) -> Mapping[str, Any] | None:
        offered = None if context.access is None else context.access.episode.tools.offered
        return None if offered is None else offered.schema_with_headers(tool)


class TaskService(EpisodeService):
    """For `/tasks/{id}/mcp`: the session is the episode, which `initialize` starts."""

    def _access(self, request: Request) -> EpisodeAccess:
        if request.context.access is None:
            raise EpisodeEndedError("the episode of this session is over: initialize a new session")
        return request.context.access

    def _open(self, request: Request) -> EpisodeAccess:
        context = request.context
        if context.access is None:
            if context.start is None:
                return self._access(request)
            episode = context.start()
            context.add_started(episode)
            context.access = EpisodeAccess.by_session(episode, context.principal)
        return context.access

    async def _list_tools(self, request: Request) -> JsonObject:
        if request.context.access is None:
            # A session of an earlier server, whose episode this server does not know.
            return tools_after_end("decathlon", can_evaluate=True)
        return await super()._list_tools(request)

    async def serve(self, request: Request) -> Result:
        if request.name != EVALUATE:
            return await super().serve(request)
        episode = self._access(request).episode
        is_untouched = episode.calls.sent == 0 and episode.claim is None
        result = await super().serve(request)
        if not is_untouched or episode.verdict is None or not isinstance(result, dict):
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


def waits_for(episode: Episode) -> JsonObject:
    """The member of a result that says what an episode waits for; none if it waits for nothing."""
    return {} if episode.waits_for is None else {"waits_for": episode.waits_for}


async def list_tools(access: EpisodeAccess, request: Request) -> JsonObject:
    """The episode's tools; waits until they are known, which can be before the episode is ready.

    A client that asks for it waits until the episode is ready.
    """
    async with waiting(request, access.episode, unit=1.0):
        offered = await access.episode.tools.known()
        # The client of a branch has to know whether the calls before its own were made.
        if access.episode.spec.calls_before or request.meta.get(READY_KEY) is True:
            await access.episode.ready()
    return {"tools": offered.evaluator_tools if access.can_evaluate else offered.tools}


def tools_after_end(names: Names, *, can_evaluate: bool) -> JsonObject:
    """What `tools/list` answers once an episode that could be played has ended."""
    # Not an error: Python clients list the tools by themselves after the first call, and an error replaces
    # the call's result.
    claim = claim_tool(names)
    return {"tools": [claim, evaluate_tool()] if can_evaluate else [claim]}


async def call_tool(
    access: EpisodeAccess, request: Request, *, agent: str = "", again: Kind | None = None
) -> Result:
    """Call one of the episode's tools, including `claim_done` and `evaluate`.

    A client that cannot evaluate gets the same error for `evaluate` as for a tool that does not exist.
    `agent`: see `Request.accepted`. `again`: what is called was accepted before, under an earlier
    connection; then it is not called again. Raises DecathlonError.
    """
    episode, is_own_tool = access.episode, False
    # Before the wait for the episode's set-up, which is no part of a call's duration.
    request.context.called_at = time.perf_counter()
    try:
        if again is Kind.CALL:
            return await _reply_again(episode, request)
        if is_own_tool := again is Kind.CLAIM or request.name == claim_name(
            episode.sandbox_factory.tool_names
        ):
            return await _claim(episode, request, agent, again=again is not None)
        if is_own_tool := access.can_evaluate and request.name == EVALUATE:
            only_argument(request.decoded_arguments(), EVALUATE)
            await request.accepted(Kind.EVALUATE, agent=agent)
            return await evaluate(episode, request)
        # Without sessions, a client that loses its connection and a client that cancels look the same. A
        # client that chose an operation comes back.
        request.detached = request.session is None and request.operation is not None
        call = await episode.calls.accept(request.name, request.call_params, request)
        return await _reply(episode, request, call, agent)
    except DecathlonError as error:
        if error.code in TOOL_FAILURES or (is_own_tool and error.code in ARGUMENT_FAULTS):
            return error_result(error)
        # An episode that ended without tools (a set-up that failed) still has a verdict.
        if request.name == EVALUATE and access.can_evaluate and episode.verdict is not None:
            return verdict_result(episode.verdict, episode.spec.policy)
        raise


async def evaluate(episode: Episode, request: Request) -> JsonObject:
    """The result of `evaluate`; waits until the attempt is graded."""
    now = time.time()
    async with waiting(request, episode):
        await episode.set_up()

    def state() -> tuple[str, float]:
        waits_for, claim = episode.waits_for, episode.claim
        message = "is being graded" if waits_for is None else f"waits for {waits_for}"
        return f"the attempt {message}", now if claim is None else claim.at.timestamp()

    async with reporting(request, state):
        verdict = await episode.evaluate()
    return verdict_result(verdict, episode.spec.policy)


async def _claim(episode: Episode, request: Request, agent: str, *, again: bool) -> JsonObject:
    if again:
        first = await claimed_before(episode, request)
    else:
        answer = only_argument(request.decoded_arguments(), "claim_done", "answer")
        if answer is not None and not isinstance(answer, str):
            raise BadRequestError(f"claim_done: `answer` must be a string, not {json_kind(answer)}")
        await request.accepted(Kind.CLAIM, agent=agent)
        async with waiting(request, episode):
            await episode.set_up()
        first = await episode.claim_done(answer, operation=request.last_key)
    return claim_result(first=first, is_graded=episode.is_graded)


async def claimed_before(episode: Episode, request: Request) -> bool:
    """Whether this request has closed the attempt. Raises UnansweredError if it is open."""
    # The request may be in progress in this server: then it claims as soon as the set-up is over.
    await episode.set_up()
    with anyio.move_on_after(CLAIM_SECONDS):
        await episode.state.reach(Phase.CLAIMED, Phase.SCORED, Phase.ENDED)
    if episode.claim is None:
        raise UnansweredError("the claim was not made: its server ended before; call the tool again")
    return episode.claim.operation == request.last_key


async def _reply_again(episode: Episode, request: Request) -> Reply:
    """The reply to a call that was accepted on an earlier connection."""
    call = await episode.calls.find(request)
    if call is None:
        raise UnansweredError("the server no longer has the reply to this call, or the call was not made")
    if not call.is_ended and call.keys.texts[-1:] == request.keys.texts[-1:]:
        # A client that comes back does not send `_meta` again. Another request has a `_meta` of its own.
        request.meta = call.params.meta
    return await _reply(episode, request, call)


async def _reply(episode: Episode, request: Request, call: Call, agent: str = "") -> Reply:
    """The reply of a task's server to a call that was accepted. `agent`: see `Request.accepted`."""
    await request.accepted(Kind.CALL, agent=agent)
    async with waiting(request, episode):
        reply = await episode.calls.reply_of(call, request)
    request.context.replied_at = time.perf_counter()
    return reply


def answer_is_lost() -> UnansweredError:
    """The error of a request whose answer cannot be made again."""
    return UnansweredError("the answer to this request is not kept: send the request again")


def only_argument(arguments: JsonObject | None, tool: str, allowed: str | None = None) -> Any:
    """The value of the allowed argument, if given. Raises BadRequestError for any other argument."""
    unknown = sorted(set(arguments or {}) - {allowed})
    if unknown:
        takes = f"takes only `{allowed}`" if allowed else "takes no arguments"
        if len(unknown) > MAX_UNKNOWN_SHOWN or max(map(len, unknown)) >= MAX_NAME_CHARACTERS:
            raise BadRequestError(f"{tool}: {len(unknown):,} unknown arguments; it {takes}")
        raise BadRequestError(f"{tool}: unknown argument `{'`, `'.join(unknown)}`; it {takes}")
    return (arguments or {}).get(allowed) if allowed else None


def waiting(
    request: Request, episode: Episode, unit: float = WAITING_UNIT
) -> AbstractAsyncContextManager[None]:
    """Report what an episode waits for until it is ready: at once if that is another episode."""
    if not request.reports_progress or episode.was_ready:
        # A sandbox that is taken back from a dead server takes seconds. To report them could contradict what
        # the request has reported there.
        return nullcontext()

    def state() -> tuple[str, float] | None:
        waits_for = episode.waits_for
        message = "the sandbox is being set up" if waits_for is None else f"waiting for {waits_for}"
        return (message, episode.started_at) if episode.state.phase in NOT_READY else None

    return reporting(request, state, unit=unit, at_once=episode.waits_for is not None)


@asynccontextmanager
async def reporting(
    request: Request,
    state: Callable[[], tuple[str, float] | None],
    *,
    unit: float = 1.0,
    at_once: bool = False,
) -> AsyncGenerator[None]:
    """Send progress every `PROGRESS_SECONDS` in the context, as long as there is a `state`.

    `state`: a message, and the time of the wall clock since when it is counted, which another server process
    knows too. The progress is the number of seconds times `unit`. `at_once`: also at the beginning.
    """
    if not request.reports_progress:
        yield
        return

    async def send_repeatedly() -> None:
        if not at_once:
            await anyio.sleep(PROGRESS_SECONDS)
        while (current := state()) is not None:
            message, since = current
            progress = max(round(time.time() - since), 0) * unit
            await request.report_progress({"progress": progress, "message": message})
            await anyio.sleep(PROGRESS_SECONDS)

    async with background_tasks() as tasks:
        tasks.start_soon(send_repeatedly)
        yield
