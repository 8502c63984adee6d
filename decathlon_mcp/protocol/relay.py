"""An episode's tools over MCP, whatever the way in: listing, calling, claiming, evaluating."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
from mcp.shared.exceptions import MCPError
from mcp_types import LOG_LEVEL_META_KEY

from decathlon_mcp.background import background_tasks
from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.errors import BadRequestError, DecathlonError, EpisodeClaimedError
from decathlon_mcp.protocol.context import Context, connection_of, notify, request_context_of
from decathlon_mcp.protocol.errors import INVALID_PARAMS, TOOL_FAILURES, as_result, translated
from decathlon_mcp.protocol.results import is_modern
from decathlon_mcp.types import JsonObject, as_object

VERDICT_KEY = "decathlon/verdict"
WHAT_NEXT = "; `evaluate` gives the verdict"
PROGRESS_SECONDS = 5.0
ENVELOPE_PREFIX = "io.modelcontextprotocol/"
LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")


async def list_tools(access: EpisodeAccess, ctx: Context) -> JsonObject:
    """The episode's tools, waited for."""
    with translated():
        async with before_ready(ctx, access.episode):
            toolbox = await access.episode.ready()
        return {"tools": toolbox.evaluator_tools if access.can_evaluate else toolbox.tools}


async def call_tool(
    access: EpisodeAccess, ctx: Context, name: str, arguments: JsonObject | None
) -> JsonObject:
    """Call one of the episode's tools, ours or the task's; to who may not judge, there is no `evaluate`.

    The task's reply is relayed as it came: its error as an error, its result as a result.
    """
    episode = access.episode
    with translated():
        try:
            async with before_ready(ctx, episode):
                toolbox = await episode.ready()
            if name == toolbox.claim_name:
                answer = _only(arguments, "claim_done", "answer")
                if answer is not None and not isinstance(answer, str):
                    raise BadRequestError(
                        f"claim_done: `answer` must be a string, not {type(answer).__name__}"
                    )
                return claimed(access, await episode.claim_done(answer))
            if name == toolbox.evaluate_name and access.can_evaluate:
                _only(arguments, "evaluate")
                return await evaluate(episode, ctx)
            return await _relay(episode, ctx, name, arguments)
        except DecathlonError as error:
            if error.code in TOOL_FAILURES:
                return as_result(error, WHAT_NEXT if _leads_to_verdict(error, access) else "")
            if name == "evaluate" and access.can_evaluate and episode.verdict is not None:
                return _verdict_result(episode)
            raise


def claimed(access: EpisodeAccess, first: bool) -> JsonObject:
    """What is said of an attempt that is closed, by this claim or by an earlier one."""
    said = "The attempt is closed" if first else "The attempt was closed before"
    text = f"{said}. It is graded as it is{WHAT_NEXT if access.can_evaluate else ''}."
    return {
        "content": [{"type": "text", "text": text}],
        "structuredContent": {"claimed": True, "first": first},
        "isError": False,
    }


async def evaluate(episode: Episode, ctx: Context) -> JsonObject:
    """The verdict, waited for. One without a score is an error that says why, never a reward of zero."""
    async with heartbeat(ctx, lambda: "the attempt is being graded"):
        await episode.evaluate()
    return _verdict_result(episode)


def before_ready(ctx: Context, episode: Episode) -> AbstractAsyncContextManager[None]:
    """Reports what an episode that is not ready yet waits for: at once, where that is not its own set-up."""

    def message() -> str:
        waits_for = episode.waiting_for
        return "the sandbox is being set up" if waits_for is None else f"waiting for {waits_for}"

    return heartbeat(ctx, message, at_once=episode.waiting_for is not None)


def _leads_to_verdict(error: DecathlonError, access: EpisodeAccess) -> bool:
    return access.can_evaluate and isinstance(error, EpisodeClaimedError)


def _verdict_result(episode: Episode) -> JsonObject:
    """By policy: whoever evaluates where it is `controller` is one, and reads all of it."""
    verdict = episode.verdict
    assert verdict is not None
    told, scored = verdict.to_json(), verdict.status == "scored"
    if episode.policy == "meta":
        text = "The evaluation is done." if scored else "The evaluation gave no verdict."
        return {
            "content": [{"type": "text", "text": text}],
            "isError": not scored,
            "_meta": {VERDICT_KEY: told},
        }
    return {
        "content": [{"type": "text", "text": verdict.text()}],
        "structuredContent": told,
        "isError": not scored,
    }


async def _relay(episode: Episode, ctx: Context, name: str, arguments: JsonObject | None) -> JsonObject:
    meta: dict[str, Any] = dict(as_object((ctx.params or {}).get("_meta")) or {})
    token = meta.get("progressToken")
    streams = request_context_of(ctx).streams

    async def on_progress(params: JsonObject) -> None:
        if token is not None and streams:
            await notify(ctx, "notifications/progress", {**params, "progressToken": token}, with_reply=True)

    async def on_message(params: JsonObject) -> None:
        if _wants_message(ctx, meta, params):
            modern = is_modern(ctx.protocol_version)
            await notify(ctx, "notifications/message", params, with_reply=streams or modern)

    reply = await episode.call(
        name,
        arguments,
        meta={key: value for key, value in meta.items() if not key.startswith(ENVELOPE_PREFIX)},
        on_progress=on_progress,
        on_message=on_message,
    )
    if (result := as_object(reply.get("result"))) is not None:
        return result
    error = as_object(reply.get("error")) or {}
    code, message = error.get("code"), error.get("message")
    raise MCPError(
        code if isinstance(code, int) else -32603,
        message if isinstance(message, str) else "the task's server failed without a word",
        error.get("data"),
    )


def _wants_message(ctx: Context, meta: JsonObject, params: JsonObject) -> bool:
    """2026-07-28 asks for log messages request by request, earlier revisions by `logging/setLevel`."""
    level = params.get("level")
    if level not in LEVELS:
        return False
    if is_modern(ctx.protocol_version):
        least = meta.get(LOG_LEVEL_META_KEY)
        return least in LEVELS and LEVELS.index(level) >= LEVELS.index(least)
    least = connection_of(ctx).state.get("log_level", "debug")
    return LEVELS.index(level) >= LEVELS.index(least)


def _only(arguments: JsonObject | None, tool: str, *allowed: str) -> Any:
    """The value of the one allowed argument. Raises BadRequestError for any other."""
    unknown = sorted(set(arguments or {}) - set(allowed))
    if unknown:
        takes = f"takes only `{'`, `'.join(allowed)}`" if allowed else "takes no arguments"
        raise BadRequestError(f"{tool}: unknown argument `{'`, `'.join(unknown)}`; it {takes}")
    return (arguments or {}).get(allowed[0]) if allowed else None


@asynccontextmanager
async def heartbeat(
    ctx: Context, message: Callable[[], str], *, at_once: bool = False
) -> AsyncGenerator[None]:
    """Report progress every few seconds, to a client that asked for it, while something takes long."""
    asked = (as_object((ctx.params or {}).get("_meta")) or {}).get("progressToken") is not None
    if not asked or not (request_context_of(ctx).streams or is_modern(ctx.protocol_version)):
        yield
        return

    async def beat() -> None:
        started = anyio.current_time()
        if not at_once:
            await anyio.sleep(PROGRESS_SECONDS)
        while True:
            await ctx.session.report_progress(round(anyio.current_time() - started), None, message())
            await anyio.sleep(PROGRESS_SECONDS)

    async with background_tasks() as tasks:
        tasks.start_soon(beat)
        yield


def require_object(value: object, what: str) -> JsonObject | None:
    """Arguments as JSON-RPC gave them. Raises MCPError where they are something else than an object."""
    if value is None:
        return None
    if (arguments := as_object(value)) is None:
        raise MCPError(INVALID_PARAMS, f"{what} must be an object, not {type(value).__name__}")
    return arguments
