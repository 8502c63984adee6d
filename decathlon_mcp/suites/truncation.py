"""Truncation of tool results that are too long for a conversation, as Toolathlon does it.

Follows `my_invoke_mcp_tool` (utils/openai_agents_monkey_patch/custom_mcp_util.py). The length is that of the
text that Toolathlon's model would read: one content item as the JSON of the SDK's model, several as a JSON
array. Results of local tools are never truncated.

The driver truncates (`decathlon_sandbox.truncation`), so that the server never receives the whole text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from decathlon_mcp.types import JsonObject, as_object

LIMIT_CHARACTERS = 100_000
FOLDER = ".overlong_tool_outputs"
"""Folder in the workspace where `handle_overlong_tool_outputs` looks for the full texts."""
OVERLONG_KEY = "decathlon/overlong"
"""Key in the `_meta` of a truncated result: the path of the full text and its length in characters."""

# The SDK's models (mcp 1.9.0, which Toolathlon locks) write these fields in this order, null or not.
_FIELDS = {
    "text": ("type", "text", "annotations"),
    "image": ("type", "data", "mimeType", "annotations"),
    "resource": ("type", "resource", "annotations"),
}
_INNER = {"annotations": ("audience", "priority"), "resource": ("uri", "mimeType")}


def without_output_schemas(tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Tool descriptions without `outputSchema`, for tools whose results may be truncated."""
    # Clients refuse a result without structured content if the tool declares an output schema.
    return [{key: value for key, value in tool.items() if key != "outputSchema"} for tool in tools]


def model_text(result: JsonObject) -> str:
    """The text of a result that Toolathlon's models read."""
    # The driver has the same function, which the server cannot import; a test compares them.
    content = result.get("content")
    items = [_dump(item) for item in cast("list[Any]", content)] if isinstance(content, list) else []
    if len(items) == 1:
        return json.dumps(items[0], ensure_ascii=False, separators=(",", ":"))
    return json.dumps(items)


def _dump(value: Any) -> Any:
    item = as_object(value)
    if item is None:
        return value
    dumped = _with_fields(item, _FIELDS.get(str(item.get("type")), ()))
    for name, fields in _INNER.items():
        if (inner := as_object(dumped.get(name))) is not None:
            dumped[name] = _with_fields(inner, fields)
    return dumped


def _with_fields(item: JsonObject, fields: Sequence[str]) -> JsonObject:
    return {**{field: item.get(field) for field in fields}, **item}
