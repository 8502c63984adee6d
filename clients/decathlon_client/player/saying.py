"""Replies and arguments in words that a terminal can show. Knows no screen.

What comes from a sandbox never reaches the terminal as it is: control characters are made visible, so that no
tool can move the cursor, set the title, or write over what was there.
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

FOLD_LINES = 8
OPEN_LINES = 400
WIDEST = 2000
"""Characters of a line that are shown; the rest is told."""
MIDDLE = re.compile(r"(?<=[^\n]{50})\n(?=[^\s*#>|•-])")
DIRECTIONS = (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)},
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *DIRECTIONS), 0xFFFD),
}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a reply: `head` says what it is (nothing for plain text), `text` what it says."""

    head: str
    text: str


def clean(text: str) -> str:
    """The text with its control characters made visible, line ends and tabs apart."""
    return text.replace("\r\n", "\n").expandtabs(4).translate(_VISIBLE)


def flowing(text: str) -> str:
    """Without the line ends in the middle of a paragraph, which the screen has others for."""
    return MIDDLE.sub(" ", clean(text).strip())


def parts_of(reply: Reply) -> tuple[Part, ...]:
    """Everything that a reply holds; structured content only where no text says the same."""
    parts = [_part(content) for content in reply.content]
    structured = reply.structured
    if structured is not None and not any(_says(content, structured) for content in reply.content):
        parts.append(Part("structured content", json.dumps(structured, indent=2, ensure_ascii=False)))
    return tuple(Part(clean(part.head), clean(part.text)) for part in parts) or (Part("nothing", ""),)


def _says(content: Mapping[str, Any], structured: Mapping[str, Any]) -> bool:
    """Whether a text is the structured content, or the one value that an SDK wrapped in `result`."""
    text = str(content.get("text", ""))
    if set(structured) == {"result"} and text == str(structured["result"]):
        return True
    try:
        told: object = json.loads(text)
    except ValueError:
        return False
    return told in (structured, structured.get("result"))


def _part(content: Mapping[str, Any]) -> Part:
    match content.get("type"):
        case "text":
            return Part("", str(content.get("text", "")))
        case "image" | "audio" as kind:
            return Part(_binary(kind, content, content.get("data")), "")
        case "resource_link":
            title = content.get("title") or content.get("name") or ""
            return Part(f"link {content.get('uri', '')}", str(title))
        case "resource":
            inner: Mapping[str, Any] = content.get("resource") or {}
            uri = inner.get("uri", "")
            if "blob" in inner:
                return Part(f"{_binary('file', inner, inner['blob'])}, {uri}", "")
            return Part(f"file {uri}", str(inner.get("text", "")))
        case kind:
            return Part(str(kind or "something"), json.dumps(dict(content), indent=2, ensure_ascii=False))


def _binary(kind: str, content: Mapping[str, Any], data: object) -> str:
    told = [str(content.get("mimeType") or "of an unknown type")]
    try:
        raw = base64.b64decode(str(data or ""), validate=True)
    except (binascii.Error, ValueError):
        return f"{kind} {told[0]}, which is not base64"
    if size := image_size(raw):
        told.append(f"{size[0]} × {size[1]} pixels")
    told.append(size_of(len(raw)))
    return f"{kind} {', '.join(told)}"


def size_of(count: int) -> str:
    """Bytes, as people say them."""
    if count < 1000:
        return f"{count} bytes"
    return f"{count / 1000:.1f} kB" if count < 1_000_000 else f"{count / 1_000_000:.1f} MB"


def image_size(raw: bytes) -> tuple[int, int] | None:
    """Width and height of a PNG, GIF or JPEG; None for what is none of them."""
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


def folded(text: str, lines: int) -> tuple[str, int]:
    """At most so many lines, none of them endless, and how many lines were left out."""
    every = text.split("\n")
    while every and not every[-1].strip():
        every.pop()
    shown = [
        line if len(line) <= WIDEST else f"{line[:WIDEST]} … ({len(line)} characters)"
        for line in every[:lines]
    ]
    return "\n".join(shown), max(0, len(every) - lines)


def arguments_line(arguments: Mapping[str, Any]) -> str:
    """A call's arguments on one line, without what JSON needs and a reader does not."""
    told = ", ".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return clean(told).replace("\n", "␊")


def whole(tool: str, arguments: Mapping[str, Any], reply: Reply | None, trouble: str) -> str:
    """Everything about a call, to be read or copied."""
    told = [f"→ {tool}", json.dumps(dict(arguments), indent=2, ensure_ascii=False), ""]
    if reply is not None:
        told.append("← failed" if reply.is_error else "←")
        told += [f"[{part.head}]\n{part.text}" if part.head else part.text for part in parts_of(reply)]
    return clean("\n".join([*told, *([f"✗ {trouble}"] if trouble else [])]))
