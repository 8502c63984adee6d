"""Truncation of long results: the full text is saved to a file, and the result has the file's path."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from decathlon_sandbox.truncation import model_text, shorten

from tests.localtools.conftest import SUITE
from tests.probe.clients import playing
from tests.probe.serving import Served, serving
from tests.storage.trajectories import events

pytestmark = pytest.mark.anyio

LIMIT_CHARACTERS = 100_000
ENVELOPE = len('{"type":"text","text":"","annotations":null}')
FITS = LIMIT_CHARACTERS - ENVELOPE
NOTICE = re.compile(
    r" \.\.\.\n\n\(The output of the tool call \(shortuuid identifier: (\w{22})\) is too long! Only the "
    r"first 100000 characters are shown here\. The original output length is (\d+) characters\. The full "
    r"output has been saved to the file (\S+)\. Please check this file carefully, as it may be very long!\)"
)


def parse_notice(text: str) -> tuple[str, int, Path]:
    """Return identifier, length and file from the notice after the truncated text."""
    match = NOTICE.fullmatch(text[LIMIT_CHARACTERS:])
    assert match is not None, text[-500:]
    return match.group(1), int(match.group(2)), Path(match.group(3))


async def test_a_longer_result_is_truncated_and_saved(served: Served) -> None:
    async with playing(served, "play", "task") as player:
        assert await player.text("long__text", characters=FITS) == "é" * FITS
        text = await player.text("long__text", characters=FITS + 1)
        (_, event) = events(served.episodes.live[-1].trajectory, "reply")
        assert event["result"]["content"] == [{"type": "text", "text": text}]
        name, length, path = parse_notice(text)
        full_text = path.read_text("utf-8")
        assert full_text[:LIMIT_CHARACTERS] == text[:LIMIT_CHARACTERS]
        assert len(full_text) == length == LIMIT_CHARACTERS + 1
        assert json.loads(full_text) == {"type": "text", "text": "é" * (FITS + 1), "annotations": None}
        assert (path.parent.name, path.parent.parent.name) == (".overlong_tool_outputs", "workspace")
        assert path.stem == name
        # Several items become one array, and an error stays an error.
        result = await player.call("long__several", characters=LIMIT_CHARACTERS)
        assert result.is_error
        (item,) = result.content
        full_text = parse_notice(item.text)[2].read_text("utf-8")
        assert full_text.startswith('[{"type": "text", "text": "\\u00e9')
        assert json.loads(full_text)[1] == {"type": "text", "text": "and more", "annotations": None}
        # Structured content would have all of it.
        tools = {tool.name: tool for tool in (await player.client.list_tools()).tools}
        assert tools["long__structured"].output_schema is None
        short = await player.call("long__structured", characters=3)
        assert short.structured_content == {"text": "ééé"}
        long = await player.call("long__structured", characters=LIMIT_CHARACTERS)
        assert long.structured_content is None
        parse_notice(long.content[0].text)


async def test_with_toolathlon_gyms_limit_the_end_of_a_reply_is_dropped(tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    shutil.copytree(SUITE, suite)
    with (suite / "suite.yaml").open("a") as file:
        file.write("overlong_characters: 8000\nsaves_overlong: false\n")
    async with (
        serving(tmp_path / "state", suite=(str(suite),), provider="host") as served,
        playing(served, "play", "task") as player,
    ):
        assert await player.text("long__text", characters=8000) == "é" * 8000
        cut = await player.call("long__text", characters=8001)
        assert cut.content[0].text == "é" * 8000 + "\n...[truncated, total 8001 chars]"
        assert cut.meta["decathlon/overlong"] == {"characters": 8001}


def test_the_length_is_that_of_the_text_for_toolathlons_models() -> None:
    part = {"type": "text", "text": "é", "_meta": {"b": 1}, "annotations": {"priority": 1.0}}
    text = '{"type":"text","text":"é","annotations":{"audience":null,"priority":1.0},"_meta":{"b":1}}'
    assert model_text({"content": [part]}) == text
    resource = {"type": "resource", "resource": {"text": "a", "uri": "file:///a"}}
    text = '{"type":"resource","resource":{"uri":"file:///a","mimeType":null,"text":"a"},"annotations":null}'
    assert model_text({"content": [resource]}) == text
    assert model_text({"content": []}) == "[]"


def text_item(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


IMAGE = {"type": "image", "data": "A" * 9000, "mimeType": "image/png"}


def test_toolathlon_gyms_limit_counts_the_text_of_all_items() -> None:
    cases: list[tuple[list[Any], list[Any] | None]] = [
        ([text_item("é" * 8000)], None),
        (
            [text_item("a" * 7999), text_item("bc"), text_item("d")],
            [text_item("a" * 7999), text_item("b\n...[truncated, total 8002 chars]")],
        ),
        ([IMAGE, text_item("a" * 8000), "junk"], None),
        (
            [IMAGE, text_item("a" * 8001), IMAGE],
            [IMAGE, text_item("a" * 8000 + "\n...[truncated, total 8001 chars]")],
        ),
    ]
    for content, expected in cases:
        shortened = shorten({"content": content, "structuredContent": {}, "isError": True}, 8000)
        assert (shortened and shortened.result) == (expected and {"content": expected, "isError": True})
