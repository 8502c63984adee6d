"""The full-screen player, driven by its keys: whole attempts at tasks of a server in this process."""

from __future__ import annotations

import json

import pytest
from decathlon_client.player.attempt import Phase, Table
from decathlon_client.player.form_screen import FormScreen
from decathlon_client.player.play_screen import PlayScreen
from decathlon_client.player.tasks_screen import TasksScreen
from decathlon_client.player.text_screens import AskScreen, ViewScreen
from decathlon_client.player.transcript import Entry
from textual.widgets import Input, OptionList, TextArea

from tests.player.conftest import LARGE, SMALL, Hands, playing

pytestmark = pytest.mark.anyio

RECIPE = {"temperature": 60, "catalyst": 4, "minutes": 56, "product_percent": 72.03, "peak_heat_kw": 10.66}


async def test_a_whole_episode_by_hand_is_rewarded_with_one(table: Table) -> None:
    async with playing(table) as hands:
        play = await hands.start("tune-reactor")
        assert "Find the recipe" in hands.text("#words")
        await hands.open("describe_reactor")
        await hands.press("ctrl+r")
        await hands.answered(play.attempt, 1)
        await hands.open("write_file")
        await hands.type("recipe.json")
        await hands.press("enter")
        await hands.type(json.dumps(RECIPE))
        await hands.press("ctrl+r")
        await hands.answered(play.attempt, 2)
        assert "Wrote " in hands.text(".reply")
        await hands.claim("60 degrees")
        assert play.attempt.verdict is not None
        assert (play.attempt.verdict.reward, play.attempt.verdict.success) == (1.0, True)
        assert play.attempt.verdict.raw["claimed"] is True
        said = hands.text()
        assert " PASSED    reward 1" in said
        assert "calls" in said
        await hands.press("n")
        await hands.screen(TasksScreen)


async def test_a_call_under_way_says_how_far_it_is_and_can_be_cancelled(table: Table) -> None:
    async with playing(table, task="find-answer") as hands:
        play = await hands.seated()
        await hands.open("probe__count")
        await hands.type("2")
        await hands.press("tab")
        await hands.type("600")
        await hands.press("ctrl+r")
        await hands.screen(PlayScreen)
        await hands.until(lambda: "at 1" in hands.text(".state"))
        await _whole(hands, "x Cancel", "c Claim", "^c Leave")
        assert "1 running" in hands.text("#status")
        await hands.press("x")
        await hands.answered(play.attempt, 1)
        assert "cancelled after" in hands.text(".state")
        await hands.open("probe__bare")
        await hands.press("ctrl+r")
        await hands.answered(play.attempt, 2)
        assert play.attempt.calls[1].reply is not None
        assert play.attempt.phase is Phase.PLAYING


async def test_what_does_not_fit_is_said_at_its_field_and_nothing_is_called(table: Table) -> None:
    async with playing(table, task="tune-reactor") as hands:
        play = await hands.seated()
        await hands.open("run_simulation")
        await hands.type("hot")
        await hands.press("enter")
        await hands.type("120")
        await hands.press("ctrl+r")
        assert isinstance(hands.app.screen, FormScreen)
        assert hands.text(".fault").split("\n") == ["✗ at most 95", "✗ required"]
        assert "2 fields do not fit" in hands.text("#said")
        focused = hands.app.focused
        assert isinstance(focused, Input)
        assert focused.value == "120"
        await hands.press("backspace")
        assert hands.text(".fault") == "✗ required"
        assert play.attempt.calls == []
        await hands.press("escape")
        form = await hands.open("run_simulation")
        assert [each.value for each in form.query(Input)] == ["hot", "12", ""]


async def test_json_is_the_way_out_of_a_form(table: Table) -> None:
    async with playing(table, task="find-answer") as hands:
        play = await hands.seated()
        form = await hands.open("probe__echo")
        await hands.type("one")
        await hands.press("ctrl+t")
        area = form.query_one("#json", TextArea)
        assert json.loads(area.text) == {"text": "one"}
        area.text = '{"text": "two", "more": [1]}'
        await hands.press("ctrl+t")
        assert "there is no field more" in hands.text("#said")
        await hands.press("ctrl+r")
        await hands.answered(play.attempt, 1)
        assert play.attempt.calls[0].arguments == {"text": "two", "more": [1]}
        await hands.open("probe__echo")
        assert hands.app.screen.query_one("#json", TextArea).text.startswith('{"text": "two"')
        hands.app.screen.query_one("#json", TextArea).text = "[1"
        await hands.press("ctrl+r")
        assert "not JSON" in hands.text("#said")


async def test_long_replies_are_folded_and_failures_are_seen(table: Table) -> None:
    async with playing(table, task="find-answer") as hands:
        play = await hands.seated()
        await hands.open("probe__shell")
        await hands.type("seq 300")
        await hands.press("ctrl+r")
        await hands.answered(play.attempt, 1)
        entry = hands.app.screen.query_one(Entry)
        await hands.until(lambda: entry.has_focus)
        assert "more lines: enter unfolds" in hands.text(".reply")
        await hands.press("enter")
        assert "300" in hands.text(".reply")
        await hands.press("v")
        view = await hands.screen(ViewScreen)
        assert '"exit_code": 0' in view.query_one(TextArea).text
        await hands.press("escape")
        await hands.screen(PlayScreen)
        await hands.open("probe__fail")
        await hands.press("ctrl+r")
        await hands.answered(play.attempt, 2)
        assert "✗ failed" in hands.text(".state")
        await hands.open("probe__refuse")
        await hands.press("ctrl+r")
        await hands.answered(play.attempt, 3)
        assert play.attempt.calls[2].trouble
        assert play.attempt.phase is Phase.PLAYING


async def test_leaving_asks_where_something_would_be_lost_and_ctrl_c_twice_leaves(table: Table) -> None:
    async with playing(table, task="find-answer") as hands:
        play = await hands.seated()
        await hands.open("probe__bare")
        await hands.press("ctrl+r")
        await hands.answered(play.attempt, 1)
        await hands.press("escape")
        await hands.screen(AskScreen)
        await hands.press("n")
        await hands.screen(PlayScreen)
        await hands.press("escape", "y")
        await hands.screen(TasksScreen)
        await hands.until(lambda: play.attempt.left)
        await hands.type("find-answer")
        await hands.press("enter")
        play = await hands.seated()
        await hands.open("probe__bare")
        await hands.press("ctrl+r")
        await hands.answered(play.attempt, 1)
        await hands.press("ctrl+c", "ctrl+c")
        await hands.until(lambda: not hands.app.is_running)
        play.attempt.leave()


async def test_a_set_up_that_fails_is_told(table: Table) -> None:
    async with playing(table, task="failing-preprocess") as hands:
        play = await hands.screen(PlayScreen)
        await hands.until(lambda: play.attempt.phase is Phase.OVER)
        assert "The attempt is over" in hands.text("#words")
        assert play.attempt.trouble in " ".join(hands.text("#words").split())
        await hands.press("escape")
        await hands.screen(TasksScreen)


async def test_no_verdict_is_not_a_reward_of_zero(table: Table) -> None:
    async with playing(table, task="crashing-verdict") as hands:
        await hands.seated()
        await hands.claim("")
        said = hands.text()
        assert "NO VERDICT" in said
        assert "reward" not in said


async def test_tasks_are_found_by_their_words(table: Table) -> None:
    async with playing(table) as hands:
        menu = await hands.screen(TasksScreen)
        await hands.until(lambda: menu.shown)
        assert {"tune-reactor", "find-answer"} <= set(menu.shown)
        await hands.type("catalyst starter")
        await hands.until(lambda: menu.shown == ["tune-reactor"])
        await hands.type(" zebra")
        await hands.until(lambda: menu.shown == [])
        assert "No task has these words" in hands.text("#prompt")
        await hands.press("enter")
        assert isinstance(hands.app.screen, TasksScreen)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x40"])
async def test_nothing_is_cut_and_every_key_is_at_the_foot(table: Table, size: tuple[int, int]) -> None:
    async with playing(table, size=size, task="find-answer") as hands:
        await hands.seated()
        await _whole(hands, "/ Search", "c Claim", "esc Tasks", "^c Leave")
        assert hands.app.screen.query_one("#tools", OptionList).region.bottom <= size[1] - 1
        await hands.open("probe__count")
        await _whole(hands, "^r Call", "^t JSON", "^o Editor", "esc Back", "^c Leave")
        await hands.press("escape", "c")
        await _whole(hands, "^r Claim", "esc Back")
        await hands.press("escape")
        await hands.screen(PlayScreen)
        await hands.press("t")
        assert hands.app.screen.query_one("#desk").display is (size == LARGE)
        await _whole(hands, "t Task", "c Claim", "^c Leave")


async def _whole(hands: Hands, *keys: str) -> None:
    await hands.until(lambda: all(key in hands.foot() for key in keys))
    assert hands.cut() == []


async def test_dark_and_light_are_a_key_apart(table: Table) -> None:
    async with playing(table) as hands:
        await hands.screen(TasksScreen)
        assert hands.app.current_theme.dark
        await hands.press("ctrl+l")
        assert not hands.app.current_theme.dark
