"""Truncation of tool results that are too long for a conversation, as in Toolathlon or toolathlon_gym.

`cut` follows Toolathlon's `my_invoke_mcp_tool` (utils/openai_agents_monkey_patch/custom_mcp_util.py). It
measures the text that Toolathlon's model would read: one content item as the JSON of the SDK's model, several
as a JSON array. `shorten` follows toolathlon_gym's `_sanitize_tool_schemas` (utils/roles/task_agent.py).
Results of local tools are never truncated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from decathlon_sandbox.strict_json import JsonObject, as_list, as_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


# The SDK's models (mcp 1.9.0, which Toolathlon locks) write these fields in this order, null or not.
_FIELDS = {
    "text": ("type", "text", "annotations"),
    "image": ("type", "data", "mimeType", "annotations"),
    "resource": ("type", "resource", "annotations"),
}
_INNER = {"annotations": ("audience", "priority"), "resource": ("uri", "mimeType")}

_ALPHABET = "23456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_ID_CHARACTERS = 22


class CutResult:
    """A result that was shortened from `characters` characters.

    `full_text` must be saved at `path`; both are None if the rest of the text is dropped.
    """

    def __init__(
        self, result: JsonObject, characters: int, path: str | None = None, full_text: str | None = None
    ) -> None:
        self.result = result
        self.characters = characters
        self.path = path
        self.full_text = full_text


def cut(result: JsonObject, folder: str, limit_characters: int) -> CutResult | None:
    """Shorten a tool result; None if it is short enough. `folder` is an absolute path."""
    full_text = model_text(result)
    if len(full_text) <= limit_characters:
        return None
    name = short_id()
    path = f"{folder}/{name}.json"
    # Upstream's words.
    text = (
        f"{full_text[:limit_characters]} ...\n\n(The output of the tool call (shortuuid identifier: {name}) "
        f"is too long! Only the first {limit_characters} characters are shown here. The original output "
        f"length is {len(full_text)} characters. The full output has been saved to the file {path}. Please "
        "check this file carefully, as it may be very long!)"
    )
    return CutResult(_with_content(result, [{"type": "text", "text": text}]), len(full_text), path, full_text)


def shorten(result: JsonObject, limit_characters: int) -> CutResult | None:
    """Drop what a result's text has beyond the limit; None if it is short enough.

    The texts of all content items count. toolathlon_gym's model gets only the first item (CAMEL's MCP client
    passes on no other), so that for results with one item this is what it reads.
    """
    items = as_list(result.get("content")) or []
    total = sum(len(_text(item)) for item in items)
    if total <= limit_characters:
        return None
    content: list[Any] = []
    remaining = limit_characters
    for item in items:
        text = _text(item)
        if len(text) > remaining:
            # Upstream's words.
            notice = f"\n...[truncated, total {total} chars]"
            content.append({"type": "text", "text": text[:remaining] + notice})
            break
        content.append(item)
        remaining -= len(text)
    return CutResult(_with_content(result, content), total)


def _text(item: Any) -> str:
    text = (as_object(item) or {}).get("text")
    return text if isinstance(text, str) else ""


def _with_content(result: JsonObject, content: list[Any]) -> JsonObject:
    # `structuredContent` would be as long, and the models of the suites never see it.
    rest = {key: value for key, value in result.items() if key != "structuredContent"}
    return {**rest, "content": content}


def model_text(result: JsonObject) -> str:
    """The text of a result that Toolathlon's models read."""
    items = [_dump(item) for item in as_list(result.get("content")) or []]
    if len(items) == 1:
        return json.dumps(items[0], ensure_ascii=False, separators=(",", ":"))
    return json.dumps(items)


def short_id() -> str:
    """A random identifier in the format of the shortuuid package: 22 characters without look-alikes."""
    # Without the module `uuid`: it would be imported from a file system that an agent may have changed.
    number, name = int.from_bytes(os.urandom(16), "big"), ""
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
