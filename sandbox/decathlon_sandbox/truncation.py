"""Truncation of tool results that are too long for a conversation, as Toolathlon does it.

Follows `my_invoke_mcp_tool` (utils/openai_agents_monkey_patch/custom_mcp_util.py). The length is that of the
text that Toolathlon's model would read: one content item as the JSON of the SDK's model, several as a JSON
array. Results of local tools are never truncated.
"""

from __future__ import annotations

import json
import os

from decathlon_sandbox.strict_json import as_list, as_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
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
    """A shortened result. `full_text`, of `characters` characters, must be saved at `path`."""

    __slots__ = ("characters", "full_text", "path", "result")

    def __init__(self, result: dict[str, Any], path: str, full_text: str) -> None:
        self.result = result
        self.path = path
        self.full_text = full_text
        self.characters = len(full_text)


def cut(result: dict[str, Any], folder: str, limit_characters: int) -> CutResult | None:
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
    # `structuredContent` would be as long, and Toolathlon's models never see it.
    rest = {key: value for key, value in result.items() if key != "structuredContent"}
    return CutResult({**rest, "content": [{"type": "text", "text": text}]}, path, full_text)


def model_text(result: dict[str, Any]) -> str:
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


def _with_fields(item: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    return {**{field: item.get(field) for field in fields}, **item}
