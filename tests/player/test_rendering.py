"""Rendering of replies for the terminal."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest
from decathlon_client import Reply
from decathlon_client.player.rendering import (
    arguments_line,
    fold,
    full_text,
    image_size,
    reply_parts,
    sanitize,
    unwrap,
)

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">II", 640, 480) + b"\x08\x02\x00\x00\x00"
JPEG = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc0\x00\x11\x08" + struct.pack(">HH", 30, 20) + bytes(12)


def reply(*content: dict[str, Any], **more: Any) -> Reply:
    return Reply.read({"content": list(content), **more})


def heads(*content: dict[str, Any], **more: Any) -> list[str]:
    return [part.head for part in reply_parts(reply(*content, **more))]


def test_control_characters_never_reach_the_terminal() -> None:
    assert sanitize("\x1b]0;title\x07 \x9b2J\r\nnext\rover") == "␛]0;title␇ \ufffd2J\nnext␍over"
    (part,) = reply_parts(reply({"type": "text", "text": "\x1b[2J"}))
    assert part.text == "␛[2J"
    assert "\x1b" not in full_text("t", {"a": "\x1b"}, reply({"type": "text", "text": "\x1b"}), "\x1b")
    assert "\x1b" not in arguments_line({"a": "\x1b[2J\n"})


def test_images_are_described() -> None:
    image = {"type": "image", "mimeType": "image/png", "data": base64.b64encode(PNG).decode()}
    assert heads(image) == [f"image image/png, 640 × 480 pixels, {len(PNG)} bytes"]
    assert heads({"type": "image", "mimeType": "image/png", "data": "?"}) == [
        "image image/png, not valid base64"
    ]
    big = base64.b64encode(bytes(12_345)).decode()
    assert heads({"type": "audio", "mimeType": "audio/wav", "data": big}) == ["audio audio/wav, 12.3 kB"]


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        (PNG, (640, 480)),
        (b"GIF89a" + struct.pack("<HH", 9, 7), (9, 7)),
        (JPEG, (20, 30)),
        (b"\xff\xd8", None),
        (b"\x89PNG", None),
        (b"", None),
    ],
)
def test_image_size_is_read_from_the_header(raw: bytes, size: tuple[int, int] | None) -> None:
    assert image_size(raw) == size


def test_files_and_links_show_their_uri() -> None:
    link = {"type": "resource_link", "uri": "file:///a.csv", "name": "a.csv"}
    text = {"type": "resource", "resource": {"uri": "file:///b.md", "text": "# B"}}
    blob = {"type": "resource", "resource": {"uri": "file:///c", "mimeType": "x/y", "blob": "AAAA"}}
    parts = reply_parts(reply(link, text, blob))
    assert [(part.head, part.text) for part in parts] == [
        ("link file:///a.csv", "a.csv"),
        ("file file:///b.md", "# B"),
        ("file x/y, 3 bytes, file:///c", ""),
    ]


def test_structured_content_is_not_repeated() -> None:
    content = {"type": "text", "text": '{"a": 1}'}
    assert heads(content, structuredContent={"a": 1}) == [""]
    assert heads(content, structuredContent={"a": 2}) == ["", "structured content"]
    assert heads({"type": "text", "text": "five"}, structuredContent={"result": "five"}) == [""]


def test_unknown_content_type_is_shown_as_json() -> None:
    (part,) = reply_parts(reply({"type": "hologram", "depth": 3}))
    assert part.head == "hologram"
    assert '"depth": 3' in part.text
    assert heads() == ["nothing"]


def test_long_texts_fold_and_long_lines_are_cut() -> None:
    assert fold("a\nb\nc\n\n", 2) == ("a\nb", 1)
    text, more = fold("x" * 5000, 8)
    assert text.endswith(" … (5000 characters)")
    assert (len(text) < 2100, more) == (True, 0)


def test_paragraphs_are_unwrapped_and_lists_kept() -> None:
    line = "It says a good deal more than fits on one line of it"
    assert unwrap(f"{line}\nand goes on.\n\nOne\n- two\n{line}\n- three") == (
        f"{line} and goes on.\n\nOne\n- two\n{line}\n- three"
    )
