"""Text of replies and arguments for a terminal, independent of any screen.

Text from a sandbox is never written to the terminal unchanged: control characters are replaced by visible
ones, so that no tool can move the cursor, set the title or overwrite the screen.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decathlon_client import Reply

FOLDED_LINES = 8
OPEN_LINES = 400
MAX_LINE_CHARACTERS = 2000
"""Longer lines are cut, with a note of how much is missing."""
WRAPPED_LINE_END = re.compile(r"(?<=[^\n]{50})\n(?=[^\s*#>|•-])")
DIRECTION_MARKS = (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)},
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *DIRECTION_MARKS), 0xFFFD),
}


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """One content item of a reply: `head` describes it (empty for plain text), `text` is its text."""

    head: str
    text: str


def sanitize(text: str) -> str:
    """Replace control characters by visible ones; line ends stay, tabs become spaces."""
    return text.replace("\r\n", "\n").expandtabs(4).translate(_VISIBLE)


def unwrap(text: str) -> str:
    """Remove line ends inside paragraphs; the screen wraps lines itself."""
    return WRAPPED_LINE_END.sub(" ", sanitize(text).strip())


def reply_parts(reply: Reply) -> tuple[ReplyPart, ...]:
    """All content of a reply. Structured content is left out when a text item repeats it."""
    parts = [_part_from(content) for content in reply.content]
    structured = reply.structured
    if structured is not None and not any(_repeats(content, structured) for content in reply.content):
        parts.append(ReplyPart("structured content", json.dumps(structured, indent=2, ensure_ascii=False)))
    return tuple(ReplyPart(sanitize(part.head), sanitize(part.text)) for part in parts) or (
        ReplyPart("nothing", ""),
    )


def _repeats(content: Mapping[str, Any], structured: Mapping[str, Any]) -> bool:
    """Whether a text item repeats the structured content (or the value that an SDK wrapped in `result`)."""
    text = str(content.get("text", ""))
    if set(structured) == {"result"} and text == str(structured["result"]):
        return True
    try:
        value: object = json.loads(text)
    except ValueError:
        return False
    return value in (structured, structured.get("result"))


def _part_from(content: Mapping[str, Any]) -> ReplyPart:
    match content.get("type"):
        case "text":
            return ReplyPart("", str(content.get("text", "")))
        case "image" | "audio" as kind:
            return ReplyPart(_describe_binary(kind, content, content.get("data")), "")
        case "resource_link":
            title = content.get("title") or content.get("name") or ""
            return ReplyPart(f"link {content.get('uri', '')}", str(title))
        case "resource":
            inner: Mapping[str, Any] = content.get("resource") or {}
            uri = inner.get("uri", "")
            if "blob" in inner:
                return ReplyPart(f"{_describe_binary('file', inner, inner['blob'])}, {uri}", "")
            return ReplyPart(f"file {uri}", str(inner.get("text", "")))
        case kind:
            return ReplyPart(
                str(kind or "something"), json.dumps(dict(content), indent=2, ensure_ascii=False)
            )


def _describe_binary(kind: str, content: Mapping[str, Any], data: object) -> str:
    facts = [str(content.get("mimeType") or "of unknown type")]
    try:
        raw = base64.b64decode(str(data or ""), validate=True)
    except (binascii.Error, ValueError):
        return f"{kind} {facts[0]}, not valid base64"
    if size := image_size(raw):
        facts.append(f"{size[0]} × {size[1]} pixels")
    facts.append(format_size(len(raw)))
    return f"{kind} {', '.join(facts)}"


def format_size(count: int) -> str:
    """A number of bytes with its unit."""
    if count < 1000:
        return f"{count} bytes"
    return f"{count / 1000:.1f} kB" if count < 1_000_000 else f"{count / 1_000_000:.1f} MB"


def image_size(raw: bytes) -> tuple[int, int] | None:
    """Width and height of a PNG, GIF or JPEG in pixels; None for other data."""
    if raw.startswith(b"\x89PNG\r\n\x1a\n") and len(raw) >= 24:
        return struct.unpack(">II", raw[16:24])
    if raw[:6] in (b"GIF87a", b"GIF89a") and len(raw) >= 10:
        return struct.unpack("<HH", raw[6:10])
    if not raw.startswith(b"\xff\xd8"):
        return None
    at = 2
    while at + 9 <= len(raw) and raw[at] == 0xFF:
        marker, length = raw[at + 1], int.from_bytes(raw[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", raw[at + 5 : at + 9])
            return width, height
        at += 2 + length
    return None


def fold(text: str, lines: int) -> tuple[str, int]:
    """Cut a text to a number of lines of bounded length; also return how many lines are hidden."""
    every = text.split("\n")
    while every and not every[-1].strip():
        every.pop()
    shown = [
        line
        if len(line) <= MAX_LINE_CHARACTERS
        else f"{line[:MAX_LINE_CHARACTERS]} … ({len(line)} characters)"
        for line in every[:lines]
    ]
    return "\n".join(shown), max(0, len(every) - lines)


def arguments_line(arguments: Mapping[str, Any]) -> str:
    """The arguments of a call on one line, without JSON's outer braces and quoted names."""
    line = ", ".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return sanitize(line).replace("\n", "␊")


def full_text(tool: str, arguments: Mapping[str, Any], reply: Reply | None, error: str) -> str:
    """The full call and its reply, for reading and copying."""
    lines = [f"→ {tool}", json.dumps(dict(arguments), indent=2, ensure_ascii=False), ""]
    if reply is not None:
        lines.append("← failed" if reply.is_error else "←")
        lines += [f"[{part.head}]\n{part.text}" if part.head else part.text for part in reply_parts(reply)]
    return sanitize("\n".join([*lines, *([f"✗ {error}"] if error else [])]))
