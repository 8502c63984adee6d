"""Our errors as MCP's: the one place that maps them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from mcp.shared.exceptions import MCPError

from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.types import JsonObject, as_object

INVALID_PARAMS = -32602
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
}
"""JSON-RPC codes of our errors' codes; the others are -32603 (internal)."""

TOOL_FAILURES = frozenset({"episode_claimed", "call_timeout", "driver_error", "limit_exceeded"})
"""What a tool call answers as a result with `isError`, for the agent to read: the episode goes on."""


def error_code(error: DecathlonError) -> int:
    return CODES.get(error.code, -32603)


def error_data(error: DecathlonError) -> JsonObject:
    """What a program can act on."""
    return {"code": error.code, "retryable": error.retryable, **error.data}


def as_result(error: DecathlonError, what_next: str = "") -> JsonObject:
    """An error as the result of a tool call, with the last words of a server that died."""
    stderr = str((as_object(error.data.get("about")) or {}).get("stderr") or "").strip()
    text = f"{error.message}; its last words: {stderr[-2000:]}" if stderr else error.message + what_next
    return {
        "content": [{"type": "text", "text": text}],
        "isError": True,
        "_meta": {"decathlon/error": error_data(error)},
    }


@contextmanager
def translated() -> Generator[None]:
    """Raise MCPError for a DecathlonError."""
    try:
        yield
    except DecathlonError as error:
        raise MCPError(error_code(error), error.message, error_data(error)) from None
