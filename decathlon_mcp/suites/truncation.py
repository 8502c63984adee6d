"""Truncation of tool results that are too long for a conversation, as Toolathlon does it.

Follows `my_invoke_mcp_tool` (utils/openai_agents_monkey_patch/custom_mcp_util.py). The length is that of the
text that Toolathlon's model would read: one content item as the JSON of the SDK's model, several as a JSON
array. Results of local tools are never truncated.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
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

_ALPHABET = "23456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_ID_CHARACTERS = 22


@dataclass(frozen=True, slots=True)
class TruncatedResult:
    """A truncated tool result. `full_text` must be saved at `path`, which the result names."""

    result: JsonObject
    path: PurePosixPath
    full_text: str


def truncate(result: JsonObject, workspace: PurePosixPath) -> TruncatedResult | None:
    """Truncate a tool result; None if it is short enough. `workspace` is absolute, in the sandbox."""
    full_text = model_text(result)
    if len(full_text) <= LIMIT_CHARACTERS:
        return None
    name = short_id()
    path = workspace / FOLDER / f"{name}.json"
    # Upstream's words.
    text = (
        f"{full_text[:LIMIT_CHARACTERS]} ...\n\n(The output of the tool call (shortuuid identifier: {name}) "
        f"is too long! Only the first {LIMIT_CHARACTERS} characters are shown here. The original output "
        f"length is {len(full_text)} characters. The full output has been saved to the file {path}. Please "
        "check this file carefully, as it may be very long!)"
    )
    meta = {
        **(as_object(result.get("_meta")) or {}),
        OVERLONG_KEY: {"path": str(path), "characters": len(full_text)},
    }
    # `structuredContent` would be as long, and Toolathlon's models never see it.
    rest = {key: value for key, value in result.items() if key != "structuredContent"}
    truncated = {**rest, "content": [{"type": "text", "text": text}], "_meta": meta}
    return TruncatedResult(truncated, path, full_text)


def without_output_schemas(tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Tool descriptions without `outputSchema`, for tools whose results may be truncated."""
    # Clients refuse a result without structured content if the tool declares an output schema.
    return [{key: value for key, value in tool.items() if key != "outputSchema"} for tool in tools]


def model_text(result: JsonObject) -> str:
    """The text of a result that Toolathlon's models read."""
    content = result.get("content")
    items = [_dump(item) for item in cast("list[Any]", content)] if isinstance(content, list) else []
    if len(items) == 1:
        return json.dumps(items[0], ensure_ascii=False, separators=(",", ":"))
    return json.dumps(items)


def short_id() -> str:
    """A random identifier in the format of the shortuuid package: 22 characters without look-alikes."""
    number, name = uuid.uuid4().int, ""
    for _ in range(_ID_CHARACTERS):
        number, digit = divmod(number, len(_ALPHABET))
        name = _ALPHABET[digit] + name
    return name


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
