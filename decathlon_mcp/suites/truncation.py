"""Where overlong tool results are saved, and what truncation means for the descriptions of tools.

The driver truncates (`decathlon_sandbox.truncation`), so that the server never receives the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence

from decathlon_mcp.types import JsonObject

FOLDER = ".overlong_tool_outputs"
"""Folder in the workspace where `handle_overlong_tool_outputs` looks for the full texts."""
OVERLONG_KEY = "decathlon/overlong"
"""Key in the `_meta` of a truncated result: the text's length in characters, and its path if it was saved."""


def without_output_schemas(tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Tool descriptions without `outputSchema`, for tools whose results may be truncated."""
    # Clients refuse a result without structured content if the tool declares an output schema.
    return [{key: value for key, value in tool.items() if key != "outputSchema"} for tool in tools]
