"""Limits on parts of a request that the server or the SDK keeps, or repeats in other messages."""

from __future__ import annotations

from mcp.shared.exceptions import MCPError

from decathlon_mcp.foreign_names import MAX_NAME_CHARACTERS
from decathlon_mcp.protocol.context import request_context_of
from decathlon_mcp.protocol.results import INVALID_PARAMS
from decathlon_mcp.protocol.sdk import Context
from decathlon_mcp.types import as_json, as_object

MAX_INITIALIZE_BYTES = 64 << 10
"""Parameters of `initialize`: the SDK keeps them as long as the session."""


def check_request(ctx: Context) -> None:
    """Raise MCPError for a long id or progress token, or an `initialize` with long parameters."""
    if ctx.method == "initialize" and len(as_json(ctx.params)) > MAX_INITIALIZE_BYTES:
        request_context_of(ctx).initialize_failed = True
        limit = f"{MAX_INITIALIZE_BYTES >> 10} KiB"
        raise MCPError(INVALID_PARAMS, f"initialize: its parameters are limited to {limit}")
    token = (as_object((ctx.params or {}).get("_meta")) or {}).get("progressToken")
    # A token is repeated in every notification of progress.
    for name, value in (("the request's id", ctx.request_id), ("`progressToken`", token)):
        if isinstance(value, str) and len(value) >= MAX_NAME_CHARACTERS:
            raise MCPError(INVALID_PARAMS, f"{name} has {MAX_NAME_CHARACTERS} characters or more")
