"""An episode's tools over MCP, for every server: listing, calling, claiming, evaluating."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter, time
from typing import Any

from mcp.server.connection import Connection
from mcp.shared.exceptions import MCPError
from mcp_types import LOG_LEVEL_META_KEY

from decathlon_mcp.driver_client.replies import CallParams
from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.episodes.operations import Caller, check_operation
from decathlon_mcp.episodes.tools import claim_tool, evaluate_tool
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.foreign_names import MAX_NAME_CHARACTERS
from decathlon_mcp.protocol.context import client_is_gone, request_context_of
from decathlon_mcp.protocol.progress import WAITING_UNIT, Progress
from decathlon_mcp.protocol.results import (
    ARGUMENT_FAULTS,
    INVALID_PARAMS,
    TOOL_FAILURES,
    claim_result,
    error_result,
    is_sessionless,
    relayed_error,
    translate_errors,
    verdict_result,
)
from decathlon_mcp.protocol.resumption import request_id_text
from decathlon_mcp.protocol.sdk import Context, connection_of, send_notification
from decathlon_mcp.types import JsonObject, Names, as_object

MAX_UNKNOWN_SHOWN = 5
"""Unknown arguments that an error message names."""
OPERATION_KEY = "decathlon/operation"
"""Key in the `_meta` of a request with the id under which its client would send it again."""
EPISODE_KEY = "decathlon/episode"
"""Key in the `_meta` of a `notifications/cancelled` at the lobby with the episode of the operation."""
ENVELOPE_PREFIX = "io.modelcontextprotocol/"
LOG_LEVEL_KEY = "log_level"
"""Key in a connection's state of the level that `logging/setLevel` has set."""
LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
"""In ascending order of severity."""


async def list_tools(access: EpisodeAccess, ctx: Context) -> JsonObject:
    """The episode's tools; waits until they are known, which can be before the episode is ready.

    In a session, as they are now. Without one, as they were first: there the list must not change.
    """
    with translate_errors():
        async with waiting_for_tools(Progress(ctx), access.episode):
            router = await access.episode.known_tools()
        if not is_sessionless(ctx.protocol_version):
            router = access.episode.current_router or router
        return {"tools": router.evaluator_tools if access.can_evaluate else router.tools}


def tools_after_end(names: Names, *, can_evaluate: bool) -> JsonObject:
    """What `tools/list` answers once an episode that could be played has ended."""
    # Not an error: Python clients list the tools by themselves after the first call, and an error replaces
    # the call's result.
    claim = claim_tool(names)
    return {"tools": [claim, evaluate_tool()] if can_evaluate else [claim]}


async def call_tool(
    access: EpisodeAccess, ctx: Context, name: str, arguments: JsonObject | None
) -> JsonObject:
    """Call one of the episode's tools, including `claim_done` and `evaluate`.

    The reply of a task's tool is relayed unchanged, as a result or as an MCPError. A client that cannot
    evaluate gets the same error for `evaluate` as for a tool that does not exist. Raises DecathlonError.
    """
    episode = access.episode
    # Before the wait for the episode's set-up, which is no part of a call's duration.
    request_context_of(ctx).called_at = perf_counter()
    progress, is_own_tool = Progress(ctx), False
    try:
        if episode.was_ready:
            # A sandbox that is taken back from a dead server takes seconds. To report them could contradict
            # what the call has reported there.
            router = await episode.ready()
        else:
            async with waiting_for_tools(progress, episode, unit=WAITING_UNIT):
                router = await episode.ready()
        is_own_tool = name == router.claim_name or (name == router.evaluate_name and access.can_evaluate)
        if not is_own_tool:
            return await _relay(episode, ctx, name, arguments, progress)
        if name == router.evaluate_name:
            _only_argument(arguments, "evaluate")
            return await evaluate(episode, progress)
        answer = _only_argument(arguments, "claim_done", "answer")
        if answer is not None and not isinstance(answer, str):
            raise BadRequestError(f"claim_done: `answer` must be a string, not {type(answer).__name__}")
        first = await episode.claim_done(answer)
        return claim_result(first=first, is_graded=episode.is_graded)
    except DecathlonError as error:
        if error.code in TOOL_FAILURES or (is_own_tool and error.code in ARGUMENT_FAULTS):
            return error_result(error)
        # An episode that ended without tools (a set-up that failed) still has a verdict.
        if name == "evaluate" and access.can_evaluate and episode.verdict is not None:
            return verdict_result(episode.verdict, episode.policy)
        raise


async def evaluate(episode: Episode, progress: Progress) -> JsonObject:
    """The result of `evaluate`; waits until the attempt is graded."""
    now = time()

    def claimed_at() -> float:
        return now if episode.claim is None else episode.claim.at.timestamp()

    async with progress.reporting(lambda: "the attempt is being graded", since=claimed_at):
        verdict = await episode.evaluate()
    return verdict_result(verdict, episode.policy)


@asynccontextmanager
async def waiting_for_tools(
    progress: Progress, episode: Episode, *, unit: float = 1.0
) -> AsyncGenerator[None]:
    """Report what an episode waits for until it is ready: at once if that is another episode."""

    def message() -> str:
        waits_for = episode.waiting_for
        return "the sandbox is being set up" if waits_for is None else f"waiting for {waits_for}"

    at_once = episode.waiting_for is not None
    async with progress.reporting(message, since=lambda: episode.started_at, unit=unit, at_once=at_once):
        yield


async def _relay(
    episode: Episode, ctx: Context, name: str, arguments: JsonObject | None, progress: Progress
) -> JsonObject:
    """Call a tool of the task's servers. Raises MCPError for a reply that is an error."""
    meta: dict[str, Any] = dict(as_object((ctx.params or {}).get("_meta")) or {})
    request_context = request_context_of(ctx)
    can_stream = request_context.can_stream

    async def on_message(params: JsonObject) -> None:
        # 2026-07-28 asks request by request and gets none by default.
        is_modern = is_sessionless(ctx.protocol_version)
        minimum = meta.get(LOG_LEVEL_META_KEY) if is_modern else minimum_level(connection_of(ctx))
        if accepts_log_message(params, minimum):
            # A reply in JSON cannot carry it; then the connection's standalone stream does, if there is one.
            with_reply = can_stream or is_modern
            await send_notification(ctx, "notifications/message", params, with_reply=with_reply)

    caller = Caller(
        operation=operation_of(ctx),
        # Without sessions, a client that loses its connection and one that cancels look the same. One that
        # chose an operation comes back.
        detached=has_operation(ctx) and is_sessionless(ctx.protocol_version),
        is_gone=partial(client_is_gone, ctx),
        on_progress=progress.relay,
        on_message=on_message,
    )
    reply = await episode.call(
        name,
        CallParams.of(arguments, relayed_meta(meta)),
        caller=caller,
    )
    request_context.replied_at = perf_counter()
    if reply.error is not None:
        raise relayed_error(reply.error)
    return reply.decoded()["result"]


def has_operation(ctx: Context) -> bool:
    """Whether the client has chosen an operation id for its request."""
    return OPERATION_KEY in (as_object((ctx.params or {}).get("_meta")) or {})


def operation_of(ctx: Context) -> str | None:
    """The id of a request that stays the same when its client sends it again; None if it has none.

    In a session the JSON-RPC id is one, because a client must not use it for two requests. Raises
    BadRequestError for an id that is not a string of the allowed length.
    """
    meta = as_object((ctx.params or {}).get("_meta")) or {}
    if OPERATION_KEY in meta:
        return check_operation(meta[OPERATION_KEY])
    session_id = connection_of(ctx).session_id
    return None if session_id is None else f"{session_id}:{request_id_text(ctx.request_id)}"


def relayed_meta(meta: JsonObject) -> JsonObject:
    """The part of a request's `_meta` that is for the task's server."""
    return {
        key: value
        for key, value in meta.items()
        if key != OPERATION_KEY and not key.startswith(ENVELOPE_PREFIX)
    }


def minimum_level(connection: Connection) -> Any:
    """The lowest level of log messages that a session's client gets; it sets it with `logging/setLevel`."""
    return connection.state.get(LOG_LEVEL_KEY, "debug")


def accepts_log_message(params: JsonObject, minimum: object) -> bool:
    """Whether a client gets a log message if `minimum` is the lowest level that it asked for."""
    level = params.get("level")
    if level not in LOG_LEVELS or minimum not in LOG_LEVELS:
        return False
    return LOG_LEVELS.index(level) >= LOG_LEVELS.index(minimum)


def _only_argument(arguments: JsonObject | None, tool: str, allowed: str | None = None) -> Any:
    """The value of the one allowed argument, if given. Raises BadRequestError for any other argument."""
    unknown = sorted(set(arguments or {}) - {allowed})
    if unknown:
        takes = f"takes only `{allowed}`" if allowed else "takes no arguments"
        if len(unknown) > MAX_UNKNOWN_SHOWN or max(map(len, unknown)) >= MAX_NAME_CHARACTERS:
            raise BadRequestError(f"{tool}: {len(unknown):,} unknown arguments; it {takes}")
        raise BadRequestError(f"{tool}: unknown argument `{'`, `'.join(unknown)}`; it {takes}")
    return (arguments or {}).get(allowed) if allowed else None


def require_object(value: object, name: str) -> JsonObject | None:
    """A JSON-RPC parameter that must be an object if it is given. Raises MCPError otherwise."""
    if value is None:
        return None
    if (arguments := as_object(value)) is None:
        raise MCPError(INVALID_PARAMS, f"{name} must be an object, not {type(value).__name__}")
    return arguments
