"""An episode's tools over MCP: listing, calling, claiming, evaluating. The same for every address.

The progress on one token must not decrease. A request that waits for its episode and then for a tool has
notifications of both, and a request that is continued by another server process starts to wait again: this
server's own progress and the progress of the task's server are one sequence.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver.replies import Reply
from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.episodes.operations import Call, Waiter
from decathlon_mcp.episodes.state import NOT_READY, Phase
from decathlon_mcp.episodes.tools.offered import claim_name, claim_tool, evaluate_tool
from decathlon_mcp.errors import BadRequestError, DecathlonError, UnansweredError
from decathlon_mcp.foreign_names import MAX_NAME_CHARACTERS
from decathlon_mcp.protocol.messages import LOG_LEVEL_KEY, PROGRESS_TOKEN, Kind
from decathlon_mcp.protocol.requests import Request, Result
from decathlon_mcp.protocol.results import (
    ARGUMENT_FAULTS,
    TOOL_FAILURES,
    claim_result,
    error_result,
    verdict_result,
)
from decathlon_mcp.protocol.sessions import LOG_LEVELS
from decathlon_mcp.types import JsonObject, Names, json_kind

EVALUATE = "evaluate"
MAX_UNKNOWN_SHOWN = 5
"""Unknown arguments that an error message names."""
CLAIM_SECONDS = 1.0
"""How long after the set-up a claim that waited for it is made at the latest."""
PROGRESS_SECONDS = 5.0
"""Time between two progress notifications while a client waits."""
WAITING_UNIT = 1e-6
"""Progress per second of a wait before a tool's call: below anything that a tool reports, except 0."""


async def list_tools(access: EpisodeAccess, request: Request) -> JsonObject:
    """The episode's tools; waits until they are known, which can be before the episode is ready."""
    async with waiting_for_tools(Progress(request), access.episode):
        offered = await access.episode.tools.known()
        if access.episode.spec.calls_before:
            # The client has to know whether the calls before its own were made.
            await access.episode.ready()
    return {"tools": offered.evaluator_tools if access.can_evaluate else offered.tools}


def tools_after_end(names: Names, *, can_evaluate: bool) -> JsonObject:
    """What `tools/list` answers once an episode that could be played has ended."""
    # Not an error: Python clients list the tools by themselves after the first call, and an error replaces
    # the call's result.
    claim = claim_tool(names)
    return {"tools": [claim, evaluate_tool()] if can_evaluate else [claim]}


async def call_tool(
    access: EpisodeAccess,
    request: Request,
    *,
    agent: str = "",
    again: Kind | None = None,
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
        names = episode.sandbox_factory.tool_names
        if is_own_tool := again is Kind.CLAIM or request.name == claim_name(names):
            return await _claim(episode, request, agent, again=again is not None)
        if is_own_tool := access.can_evaluate and request.name == EVALUATE:
            only_argument(request.decoded_arguments(), EVALUATE)
            await request.accepted(Kind.EVALUATE, agent=agent)
            return await evaluate(episode, request)
        waiter = _waiter(request)
        call = await episode.calls.accept(request.name, request.call_params, waiter)
        return await _reply(episode, request, call, waiter, agent)
    except DecathlonError as error:
        if error.code in TOOL_FAILURES or (is_own_tool and error.code in ARGUMENT_FAULTS):
            return error_result(error)
        # An episode that ended without tools (a set-up that failed) still has a verdict.
        if request.name == EVALUATE and access.can_evaluate and episode.verdict is not None:
            return verdict_result(episode.verdict, episode.spec.policy)
        raise


async def evaluate(episode: Episode, request: Request) -> JsonObject:
    """The result of `evaluate`; waits until the attempt is graded."""
    now, progress = time.time(), Progress(request)

    def claimed_at() -> float:
        return now if episode.claim is None else episode.claim.at.timestamp()

    async with waiting_for_tools(progress, episode, unit=WAITING_UNIT):
        await episode.set_up()

    def message() -> str:
        waits_for = episode.waits_for
        return "the attempt is being graded" if waits_for is None else f"the attempt waits for {waits_for}"

    async with progress.reporting(message, since=claimed_at):
        verdict = await episode.evaluate()
    return verdict_result(verdict, episode.spec.policy)


@asynccontextmanager
async def waiting_for_tools(
    progress: Progress, episode: Episode, *, unit: float = 1.0
) -> AsyncGenerator[None]:
    """Report what an episode waits for until it is ready: at once if that is another episode."""

    def message() -> str:
        waits_for = episode.waits_for
        return "the sandbox is being set up" if waits_for is None else f"waiting for {waits_for}"

    if episode.was_ready:
        # A sandbox that is taken back from a dead server takes seconds. To report them could contradict what
        # the request has reported there.
        yield
        return
    async with progress.reporting(
        message,
        since=lambda: episode.started_at,
        unit=unit,
        at_once=episode.waits_for is not None,
        while_=lambda: episode.state.phase in NOT_READY,
    ):
        yield


async def _claim(episode: Episode, request: Request, agent: str, *, again: bool) -> JsonObject:
    if again:
        first = await claimed_before(episode, request)
    else:
        answer = only_argument(request.decoded_arguments(), "claim_done", "answer")
        if answer is not None and not isinstance(answer, str):
            raise BadRequestError(f"claim_done: `answer` must be a string, not {json_kind(answer)}")
        await request.accepted(Kind.CLAIM, agent=agent)
        async with waiting_for_tools(Progress(request), episode, unit=WAITING_UNIT):
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
    waiter = _waiter(request)
    call = await episode.calls.find(waiter)
    if call is None:
        raise UnansweredError("the server no longer has the reply to this call, or the call was not made")
    if not call.is_ended and call.keys.texts[-1:] == request.keys.texts[-1:]:
        # A client that comes back does not send `_meta` again. Another request has a `_meta` of its own.
        request.meta = call.params.meta
    return await _reply(episode, request, call, waiter)


def _waiter(request: Request) -> Waiter:
    """The request as one that waits for a call's reply, with the call's notifications before."""

    async def on_message(params: JsonObject) -> None:
        # 2026-07-28 asks request by request and gets none by default.
        session = request.session
        minimum = request.meta.get(LOG_LEVEL_KEY) if session is None else session.log_level
        if accepts_log_message(params, minimum):
            # A reply in JSON cannot carry it; then the session's own stream does, if there is one.
            await request.notify("notifications/message", params, with_reply=request.can_stream)

    return Waiter(
        keys=request.keys,
        # Without sessions, a client that loses its connection and one that cancels look the same. One that
        # chose an operation comes back.
        detached=request.is_sessionless and request.operation is not None,
        is_gone=request.is_gone,
        on_message=on_message,
    )


async def _reply(episode: Episode, request: Request, call: Call, waiter: Waiter, agent: str = "") -> Reply:
    """The reply of a task's server to a call that was accepted. `agent`: see `Request.accepted`."""
    request.call = call
    request.on_answered = partial(episode.calls.operations.response_over, call, waiter)
    await request.accepted(Kind.CALL, agent=agent)
    progress = Progress(request)
    waiter.on_progress = progress.relay
    async with waiting_for_tools(progress, episode, unit=WAITING_UNIT):
        reply = await episode.calls.reply_of(call, waiter)
    request.context.replied_at = time.perf_counter()
    return reply


def answer_is_lost() -> UnansweredError:
    """The error of a request whose answer cannot be made again."""
    return UnansweredError("the answer to this request is not kept: send the request again")


def accepts_log_message(params: JsonObject, minimum: object) -> bool:
    """Whether a client gets a log message if `minimum` is the lowest level that it asked for."""
    level = params.get("level")
    if level not in LOG_LEVELS or minimum not in LOG_LEVELS:
        return False
    return LOG_LEVELS.index(level) >= LOG_LEVELS.index(minimum)


def only_argument(arguments: JsonObject | None, tool: str, allowed: str | None = None) -> Any:
    """The value of the allowed argument, if given. Raises BadRequestError for any other argument."""
    unknown = sorted(set(arguments or {}) - {allowed})
    if unknown:
        takes = f"takes only `{allowed}`" if allowed else "takes no arguments"
        if len(unknown) > MAX_UNKNOWN_SHOWN or max(map(len, unknown)) >= MAX_NAME_CHARACTERS:
            raise BadRequestError(f"{tool}: {len(unknown):,} unknown arguments; it {takes}")
        raise BadRequestError(f"{tool}: unknown argument `{'`, `'.join(unknown)}`; it {takes}")
    return (arguments or {}).get(allowed) if allowed else None


def _always() -> bool:
    return True


class Progress:
    """The progress of one request, if its client asked for it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._token = request.meta.get(PROGRESS_TOKEN)
        self._last = 0.0

    @property
    def _is_wanted(self) -> bool:
        return self._token is not None and self._request.can_stream

    async def relay(self, params: JsonObject) -> None:
        """Pass on a notification of the task's server, under the client's own token."""
        if self._is_wanted:
            await self._send({**params, "progress": max(params["progress"], self._last)})

    @asynccontextmanager
    async def reporting(
        self,
        message: Callable[[], str],
        *,
        since: Callable[[], float],
        unit: float = 1.0,
        at_once: bool = False,
        while_: Callable[[], bool] = _always,
    ) -> AsyncGenerator[None]:
        """Send progress every `PROGRESS_SECONDS` while the context is open and `while_` holds.

        The progress is the number of seconds since `since`, a time of the wall clock, times `unit`. It is a
        time that another server process knows too. `at_once`: also at the beginning.
        """
        if not self._is_wanted:
            yield
            return

        async def send_repeatedly() -> None:
            if not at_once:
                await anyio.sleep(PROGRESS_SECONDS)
            while while_():
                progress = max(round(time.time() - since()), 0) * unit
                await self._send({"progress": max(progress, self._last), "message": message()})
                await anyio.sleep(PROGRESS_SECONDS)

        async with background_tasks() as tasks:
            tasks.start_soon(send_repeatedly)
            yield

    async def _send(self, params: JsonObject) -> None:
        self._last = params["progress"]
        params = {**params, PROGRESS_TOKEN: self._token}
        await self._request.notify("notifications/progress", params)
