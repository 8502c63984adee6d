"""Results and errors as MCP has them. The only place that maps this project's errors to MCP."""

from __future__ import annotations

import json

from decathlon_mcp import __version__
from decathlon_mcp.errors import DecathlonError, failure_text
from decathlon_mcp.grading.verdict import REWARDED, Verdict
from decathlon_mcp.protocol.messages import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    MISSING_CLIENT_CAPABILITY,
    SERVER_INFO_KEY,
    McpError,
)
from decathlon_mcp.settings import RewardPolicy
from decathlon_mcp.types import JsonObject, as_object

VERDICT_KEY = "decathlon/verdict"
ERROR_KEY = "decathlon/error"
SERVER_INFO: JsonObject = {"name": "decathlon-mcp", "title": "Toolathlon", "version": __version__}
NO_MESSAGE = "the task's server answered with an error without a message"

CODES = {
    "bad_request": INVALID_PARAMS,
    "unknown_tool": INVALID_PARAMS,
    "unknown_task": INVALID_PARAMS,
    "unknown_episode": -32004,
    "access_denied": -32005,
    "at_capacity": -32006,
    "not_runnable": -32007,
    "episode_ended": -32008,
    "sandbox_lost": -32009,
    "set_up_failed": -32010,
    "unanswered": -32011,
}
"""JSON-RPC codes by `DecathlonError.code`; all others are `INTERNAL_ERROR`."""

STATUS = {
    "unknown_task": 404,
    "unknown_episode": 404,
    "bad_request": 400,
    "not_runnable": 409,
    "at_capacity": 503,
    "access_denied": 403,
}
"""HTTP status by `DecathlonError.code`, for what is not a JSON-RPC request; all others are 500."""
SESSIONLESS_STATUS = {
    -32700: 400,
    -32600: 400,
    -32602: 400,
    -32601: 404,
    -32020: 400,
    -32021: 400,
    -32022: 400,
}
"""HTTP status by the code of an error, in revisions without sessions; 200 for all others."""

RELAYED_CODES = frozenset({INVALID_PARAMS, INTERNAL_ERROR, MISSING_CLIENT_CAPABILITY})
"""Codes that errors of a task's server keep; every other code becomes INTERNAL_ERROR.

The other codes have a meaning between client and server: this server's own codes, the SDK's codes for
connections and sessions that ended, and most codes that the SDK turns into an HTTP status."""
RELAYED_MESSAGE_CHARACTERS = 4_000

TOOL_FAILURES = frozenset({"episode_claimed", "call_timeout", "driver_error", "limit_exceeded"})
"""Codes that a tool call answers with an `isError` result: the agent reads it, the episode continues."""


ARGUMENT_FAULTS = frozenset({"bad_request", "unknown_task", "unknown_episode", "unknown_tool"})
"""Codes that this server's own tools answer with an `isError` result: the agent can correct its arguments."""


def envelope_members(meta: JsonObject) -> JsonObject:
    """The members that 2026-07-28 requires of every result. `meta`: the result's `_meta` without them."""
    # These replace the members that a task's server sends: its `input_required` would ask the client for
    # sampling or elicitation.
    return {"resultType": "complete", "_meta": {**meta, SERVER_INFO_KEY: SERVER_INFO}}


def structured_result(value: JsonObject, *, text: str | None = None, is_error: bool = False) -> JsonObject:
    """A tool result with structured content, and with the same value as JSON text, after `text` if given."""
    # Many clients show a model only the text.
    texts = [json.dumps(value, ensure_ascii=False, default=str)]
    if text is not None:
        texts.insert(0, text)
    content = [{"type": "text", "text": text} for text in texts]
    return {"content": content, "structuredContent": value, "isError": is_error}


def claim_result(*, first: bool, is_graded: bool, ignored_turns: bool = False, hint: str = "") -> JsonObject:
    """Result of `claim_done`. `first` is false where the attempt was already closed.

    `is_graded`: whether the attempt will be. `ignored_turns`: the client reported turns, but its report does
    not count.
    """
    # `hint` is for a client that starts episodes. Agents do not learn of `evaluate` here: most programs that
    # play with a model hide it, and a model would try to call it.
    state = "The attempt is closed" if first else "The attempt was already closed"
    turns = " `turns` is not counted: only a controller may report it." if ignored_turns else ""
    graded = "It is graded as it is" if is_graded else "It is not graded and counts as failed"
    text = f"{state}. {graded}{hint}.{turns}"
    return structured_result({"claimed": True, "first": first}, text=text)


def verdict_result(verdict: Verdict, policy: RewardPolicy) -> JsonObject:
    """Result of `evaluate`. A verdict without a reward is an error that says why, never a reward of zero."""
    rewarded = verdict.status in REWARDED
    if policy != "meta":
        # With policy `controller` only controllers evaluate, and they read all of it.
        return structured_result(verdict.to_json(), text=verdict.text(), is_error=not rewarded)
    # Clients keep `_meta` from the model, so the text must not give the reward away.
    text = "The evaluation is done." if rewarded else "The evaluation gave no verdict."
    content = [{"type": "text", "text": text}]
    return {"content": content, "isError": not rewarded, "_meta": {VERDICT_KEY: verdict.to_json()}}


def relayed_error(error: JsonObject) -> McpError:
    """An error of a task's server for the client, which cannot be taken for one of this server.

    Errors of this server have `data.code`; here `data` has `source` "task", and the error's own code and data
    are below `error`.
    """
    code, message = error.get("code"), error.get("message")
    number = code if type(code) is int and code in RELAYED_CODES else INTERNAL_ERROR
    text = message[:RELAYED_MESSAGE_CHARACTERS] if isinstance(message, str) and message else NO_MESSAGE
    data: JsonObject = {
        "source": "task",
        "error": {key: error[key] for key in ("code", "data") if key in error},
    }
    if number == MISSING_CLIENT_CAPABILITY:
        # Clients look for it at the place that the specification gives it.
        data["requiredCapabilities"] = (as_object(error.get("data")) or {}).get("requiredCapabilities")
    return McpError(number, text, data)


def error_code(error: DecathlonError) -> int:
    """The JSON-RPC code of an error."""
    return CODES.get(error.code, INTERNAL_ERROR)


def error_data(error: DecathlonError) -> JsonObject:
    """The part of an error that a program can act on."""
    return {"code": error.code, "retryable": error.retryable, **error.data}


def error_result(error: DecathlonError) -> JsonObject:
    """An error as the result of a tool call, with the end of the stderr of a server that died."""
    return {
        "content": [{"type": "text", "text": failure_text(error)}],
        "isError": True,
        "_meta": {ERROR_KEY: error_data(error)},
    }


def wire_error(error: DecathlonError, *, status: int | None = None) -> McpError:
    """An error as MCP has it. `status`: see `McpError`."""
    return McpError(error_code(error), error.message, error_data(error), status=status)


def retry_after(error: McpError) -> str | None:
    """The value of the header `Retry-After` for an error that says when to try again."""
    # Clients show the message and `data` to their users; programs that speak plain HTTP read the header.
    data = as_object(error.data) or {}
    seconds = data.get("retryAfterSeconds") if data.get("code") == "at_capacity" else None
    return None if seconds is None else f"{seconds:.0f}"
