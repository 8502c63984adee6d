"""Replies too long for a conversation, cut as Toolathlon cuts them.

Follows `my_invoke_mcp_tool` (utils/openai_agents_monkey_patch/custom_mcp_util.py): what counts is the text
that its model would have read, one content item as the JSON of the SDK's model, several as a JSON array.
The local tools' replies are never cut.
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
"""Below the workspace, where `handle_overlong_tool_outputs` looks for them."""
OVERLONG_KEY = "decathlon/overlong"
"""`_meta` of a reply that was cut: where the whole is, and its length in characters."""

_FIELDS = {
    "text": ("type", "text", "annotations"),
    "image": ("type", "data", "mimeType", "annotations"),
    "resource": ("type", "resource", "annotations"),
}
_INNER = {"annotations": ("audience", "priority"), "resource": ("uri", "mimeType")}
"""The fields that the SDK's models (mcp 1.9.0, which Toolathlon locks) write in this order, null or not."""

_ALPHABET = "23456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_ID_CHARACTERS = 22


@dataclass(frozen=True, slots=True)
class Overlong:
    """A reply to be shown cut, and what is to be saved whole at `path`."""

    shown: JsonObject
    path: PurePosixPath
    whole: str


def cut(result: JsonObject, workspace: PurePosixPath) -> Overlong | None:
    """None for a result that is short enough. `workspace` is absolute, in the sandbox.

    `structuredContent`, which Toolathlon's models never see and which would be as long, is left out.
    """
    whole = as_told(result)
    if len(whole) <= LIMIT_CHARACTERS:
        return None
    name = short_id()
    path = workspace / FOLDER / f"{name}.json"
    text = (
        f"{whole[:LIMIT_CHARACTERS]} ...\n\n(The output of the tool call (shortuuid identifier: {name}) is "
        f"too long! Only the first {LIMIT_CHARACTERS} characters are shown here. The original output length "
        f"is {len(whole)} characters. The full output has been saved to the file {path}. Please check this "
        "file carefully, as it may be very long!)"
    )
    about = {
        **(as_object(result.get("_meta")) or {}),
        OVERLONG_KEY: {"path": str(path), "characters": len(whole)},
    }
    shown = {key: value for key, value in result.items() if key != "structuredContent"}
    return Overlong({**shown, "content": [{"type": "text", "text": text}], "_meta": about}, path, whole)


def without_output_schemas(tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Tools whose replies may be cut promise no structured content: clients refuse a reply that lacks it."""
    return [{key: value for key, value in tool.items() if key != "outputSchema"} for tool in tools]


def as_told(result: JsonObject) -> str:
    """A result as the text that Toolathlon's models read."""
    content = result.get("content")
    items = [_dumped(item) for item in cast("list[Any]", content)] if isinstance(content, list) else []
    if len(items) == 1:
        return json.dumps(items[0], ensure_ascii=False, separators=(",", ":"))
    return json.dumps(items)


def short_id() -> str:
    """Of the form that the shortuuid package gives: 22 characters without look-alikes."""
    number, name = uuid.uuid4().int, ""
    for _ in range(_ID_CHARACTERS):
        number, digit = divmod(number, len(_ALPHABET))
        name = _ALPHABET[digit] + name
    return name


def _dumped(value: Any) -> Any:
    item = as_object(value)
    if item is None:
        return value
    told = _filled(item, _FIELDS.get(str(item.get("type")), ()))
    for name, fields in _INNER.items():
        if (inner := as_object(told.get(name))) is not None:
            told[name] = _filled(inner, fields)
    return told


def _filled(item: JsonObject, fields: Sequence[str]) -> JsonObject:
    return {**{field: item.get(field) for field in fields}, **item}
