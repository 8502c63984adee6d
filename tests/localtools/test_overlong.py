"""Replies too long for a conversation: cut, saved and announced where the suite cuts, else relayed whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.suites.truncation import LIMIT_CHARACTERS, as_told, short_id
from tests.localtools.conftest import SUITE
from tests.probe.clients import playing
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.anyio

AROUND = len('{"type":"text","text":"","annotations":null}')
FITS = LIMIT_CHARACTERS - AROUND
NOTICE = re.compile(
    r" \.\.\.\n\n\(The output of the tool call \(shortuuid identifier: (\w{22})\) is too long! Only the "
    r"first 100000 characters are shown here\. The original output length is (\d+) characters\. The full "
    r"output has been saved to the file (\S+)\. Please check this file carefully, as it may be very long!\)"
)


def announced(text: str) -> tuple[str, int, Path]:
    """What stands after the part that is shown: identifier, length, file."""
    match = NOTICE.fullmatch(text[LIMIT_CHARACTERS:])
    assert match is not None, text[-500:]
    return match.group(1), int(match.group(2)), Path(match.group(3))


async def test_a_reply_that_just_fits_is_relayed_as_it_came(served: Served) -> None:
    async with playing(served, "play", "task") as player:
        assert await player.text("long__text", characters=FITS) == "é" * FITS


async def test_one_character_more_and_it_is_cut_saved_and_announced(served: Served) -> None:
    async with playing(served, "play", "task") as player:
        text = await player.text("long__text", characters=FITS + 1)
        name, length, path = announced(text)
        whole = path.read_text("utf-8")
        assert whole[:LIMIT_CHARACTERS] == text[:LIMIT_CHARACTERS]
        assert len(whole) == length == LIMIT_CHARACTERS + 1
        assert json.loads(whole) == {"type": "text", "text": "é" * (FITS + 1), "annotations": None}
        assert (path.parent.name, path.parent.parent.name) == (".overlong_tool_outputs", "workspace")
        assert path.stem == name


async def test_several_items_are_one_array_and_an_error_stays_one(served: Served) -> None:
    async with playing(served, "play", "task") as player:
        result = await player.call("long__several", characters=LIMIT_CHARACTERS)
        assert result.is_error
        (item,) = result.content
        whole = announced(item.text)[2].read_text("utf-8")
        assert whole.startswith('[{"type": "text", "text": "\\u00e9')
        assert json.loads(whole)[1] == {"type": "text", "text": "and more", "annotations": None}


async def test_no_tool_promises_structured_content_that_a_cut_would_break(served: Served) -> None:
    async with playing(served, "play", "task") as player:
        tools = {tool.name: tool for tool in (await player.client.list_tools()).tools}
        assert tools["long__structured"].output_schema is None
        short = await player.call("long__structured", characters=3)
        assert short.structured_content == {"text": "ééé"}
        cut = await player.call("long__structured", characters=LIMIT_CHARACTERS)
        assert cut.structured_content is None
        announced(cut.content[0].text)


async def test_the_trajectory_keeps_what_the_agent_saw(served: Served) -> None:
    async with playing(served, "play", "task") as player:
        text = await player.text("long__text", characters=LIMIT_CHARACTERS)
        (event,) = served.episodes.live[-1].journal.events("call")
        assert event["result"]["content"] == [{"type": "text", "text": text}]


async def test_local_tools_are_never_cut(served: Served) -> None:
    async with playing(served, "play", "task") as player:
        assert len(await player.text("local__shout", text="a" * 1000, times=150)) == 150_000


@pytest.mark.parametrize("profiles_own", [True, False])
async def test_raw_relays_everything_whole(tmp_path: Path, profiles_own: bool) -> None:
    """By the operator's word, or as any suite does that does not cut."""
    settings: dict[str, Any] = {"suite": (SUITE,), "overlong": "raw"}
    async with serving(tmp_path, provider="local", **({} if profiles_own else settings)) as served:
        if profiles_own:
            async with playing(served, "find-answer", "task") as player:
                assert await player.text("probe__big", characters=150_000) == "x" * 150_000
            return
        async with playing(served, "play", "task") as player:
            result = await player.call("long__structured", characters=150_000)
            assert result.content[0].text == "é" * 150_000
            assert result.structured_content == {"text": "é" * 150_000}


async def test_cut_can_be_asked_for(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, provider="local", overlong="cut") as served,
        playing(served, "find-answer", "task") as player,
    ):
        announced(await player.text("probe__big", characters=150_000))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([], "[]"),
        ([{"text": "é", "type": "text"}], '{"type":"text","text":"é","annotations":null}'),
        (
            [{"type": "text", "text": "a", "_meta": {"b": 1}, "annotations": {"priority": 1.0}}],
            '{"type":"text","text":"a","annotations":{"audience":null,"priority":1.0},"_meta":{"b":1}}',
        ),
        (
            [{"type": "image", "mimeType": "image/png", "data": "AA=="}],
            '{"type":"image","data":"AA==","mimeType":"image/png","annotations":null}',
        ),
        (
            [{"type": "resource", "resource": {"text": "a", "uri": "file:///a"}}],
            '{"type":"resource","resource":{"uri":"file:///a","mimeType":null,"text":"a"},"annotations":null}',
        ),
    ],
)
async def test_a_result_is_counted_as_toolathlons_models_read_it(content: list[Any], told: str) -> None:
    assert as_told({"content": content}) == told


async def test_identifiers_look_like_those_of_shortuuid() -> None:
    names = {short_id() for _ in range(100)}
    assert len(names) == 100
    assert all(re.fullmatch(r"[2-9A-HJ-NP-Za-km-z]{22}", name) for name in names)
