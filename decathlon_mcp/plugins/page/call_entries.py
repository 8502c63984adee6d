"""Calls and notes as the page shows them: arguments by name, replies by part, and folded texts."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from decathlon_mcp.plugins.history.values import CallEntry, Entry, NoteEntry, Text
from decathlon_mcp.plugins.page.plots import Scale
from decathlon_mcp.types import as_object

FOLDED_CHARACTERS = 2_000
"""A longer text is folded."""
MAX_PARSED_BYTES = 64 << 10
"""Longer JSON is shown as text: to parse it would keep the server waiting."""
MAX_PROSE = 32 << 10
"""Characters of notes of one stretch that are shown as Markdown: for the rest it would take too long."""
MAX_PARTS = 50
MAX_IMAGE_BYTES = 8 << 20
BAR_WIDTH = 120.0
IMAGE_BEGINNINGS = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/webp": (b"RIFF",),
}
"""What a file of each kind begins with. Other kinds, such as SVG, are programs for a browser."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a call. `name`: of an argument. `text`: as far as it is shown; `hidden`: bytes that are not.

    `image`: a data URL.
    """

    name: str
    text: str
    kind: Literal["text", "line", "image", "prose"] = "text"
    hidden: int = 0
    image: str = ""


@dataclass(frozen=True, slots=True)
class ShownCall:
    """One call. `start`, `width`: of its bar, among the calls beside it."""

    entry: CallEntry
    arguments: tuple[Part, ...]
    reply: tuple[Part, ...]
    start: float
    width: float
    is_note = False


@dataclass(frozen=True, slots=True)
class ShownNote:
    """One note."""

    entry: NoteEntry
    text: Part
    is_note = True


def shown(entries: Sequence[Entry], *, whole: bool = False) -> list[ShownCall | ShownNote]:
    """Entries of one stretch of an episode. `whole`: nothing that is there is folded."""
    calls = [entry for entry in entries if isinstance(entry, CallEntry)]
    first = min((call.time for call in calls), default=0.0)
    last = max((call.time + (call.seconds or 0.0) for call in calls), default=first)
    x = Scale(first, max(last, first + 1e-3), 0.0, BAR_WIDTH)
    limit = MAX_PARSED_BYTES if whole else FOLDED_CHARACTERS
    rest = MAX_PROSE
    result: list[ShownCall | ShownNote] = []
    for entry in entries:
        if isinstance(entry, NoteEntry):
            text = _text_part("", entry.text.raw, limit, entry.text)
            rest -= len(text.text)
            result.append(ShownNote(entry, text if rest < 0 else replace(text, kind="prose")))
            continue
        start = x(entry.time)
        width = min(BAR_WIDTH, max(2.0, x(first + (entry.seconds or 0.0))))
        result.append(
            ShownCall(
                entry,
                tuple(_arguments(entry.arguments, limit)),
                tuple(_reply(entry, limit)),
                min(start, BAR_WIDTH - width),
                width,
            )
        )
    return result


def parsed(text: Text) -> Any:
    """The value of JSON text; None if it is too long, or none."""
    if text.truncated or text.size_bytes > MAX_PARSED_BYTES:
        return None
    try:
        return json.loads(text.raw)
    except (ValueError, RecursionError):
        return None


def _arguments(text: Text | None, limit: int) -> Iterable[Part]:
    if text is None:
        return
    values = as_object(parsed(text))
    if values is None:
        yield _text_part("", text.raw, limit, text)
        return
    for name, value in list(values.items())[:MAX_PARTS]:
        yield _text_part(name[:200], value if isinstance(value, str) else _compact(value), limit)
    if len(values) > MAX_PARTS:
        yield Part("", f"and {len(values) - MAX_PARTS} more", "line")


def _reply(entry: CallEntry, limit: int) -> Iterable[Part]:
    text = entry.reply
    if text is None:
        return
    value = as_object(parsed(text))
    if value is None:
        yield _text_part("", text.raw, limit, text)
        return
    if entry.reply_kind != "result":
        message = value.get("message")
        yield _text_part("", message if isinstance(message, str) else _compact(value), limit)
        return
    content: Any = value.get("content")
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    for part in parts[:MAX_PARTS]:
        yield _content_part(as_object(part), part, limit)
    if len(parts) > MAX_PARTS:
        yield Part("", f"and {len(parts) - MAX_PARTS} more parts", "line")
    if not parts:
        yield _text_part("", _compact(value.get("structuredContent", value)), limit)


def _content_part(part: dict[str, Any] | None, value: Any, limit: int) -> Part:
    if part is None:
        return _text_part("", _compact(value), limit)
    kind, text = part.get("type"), part.get("text")
    if kind == "text" and isinstance(text, str):
        return _text_part("", text, limit)
    if kind == "image" and (image := image_url(part.get("data"), part.get("mimeType"))):
        return Part("", "", "image", image=image)
    resource = as_object(part.get("resource"))
    if kind == "resource" and resource is not None and isinstance(resource.get("text"), str):
        return _text_part(str(resource.get("uri", ""))[:500], resource["text"], limit)
    return _text_part("", _compact(part), limit)


def image_url(data: object, media_type: object) -> str:
    """The data URL of an image; empty if it is not of a kind that is shown, or does not begin like one."""
    if not isinstance(data, str) or not isinstance(media_type, str) or len(data) > MAX_IMAGE_BYTES * 4 // 3:
        return ""
    beginnings = IMAGE_BEGINNINGS.get(media_type)
    try:
        image = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return ""
    if beginnings is None or not image.startswith(beginnings):
        return ""
    if media_type == "image/webp" and image[8:12] != b"WEBP":
        return ""
    return f"data:{media_type};base64,{data}"


def _text_part(name: str, text: str, limit: int, whole: Text | None = None) -> Part:
    """A text up to the limit. `whole`: the full text."""
    cut = text[:limit]
    hidden = len(text.encode("utf-8", "replace")) - len(cut.encode("utf-8", "replace"))
    if whole is not None and whole.truncated:
        hidden = max(hidden, whole.size_bytes - len(cut.encode("utf-8", "replace")))
    is_line = "\n" not in cut and len(cut) <= 100
    return Part(name, cut, "line" if is_line and name else "text", hidden)


def _compact(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "(cannot be shown)"
