"""The full-screen player: whole attempts, driven by key presses."""

from __future__ import annotations

import json

import pytest
from decathlon_client.player.form_screen import FormScreen
from decathlon_client.player.play_screen import PlayScreen
from decathlon_client.player.screens import AskScreen, ViewScreen
from decathlon_client.player.session import Phase, SessionManager
from decathlon_client.player.tasks_screen import TasksScreen
from decathlon_client.player.transcript import Entry
from textual.events import Key
from textual.widgets import Input, OptionList, Static, TextArea

from tests.player.conftest import LARGE, SMALL, Ui, running_player

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

RECIPE = {"temperature": 60, "catalyst": 4, "minutes": 56, "product_percent": 72.03, "peak_heat_kw": 10.66}


async def test_whole_episode_with_keys_gets_reward_one(sessions: SessionManager) -> None:
    async with running_player(sessions) as ui:
        play = await ui.start("tune-reactor")
        assert "Find the recipe" in ui.text("#words")
        await ui.open("describe_reactor")
        await ui.press("ctrl+r")
        await ui.wait_for_calls(play.session, 1)
        await ui.open("write_file")
        await ui.type("recipe.json")
        await ui.press("enter")
        await ui.type(json.dumps(RECIPE))
        await ui.press("ctrl+r")
        await ui.wait_for_calls(play.session, 2)
        assert "Wrote " in ui.text(".reply")
        await ui.claim("60 degrees")
        assert play.session.verdict is not None
        assert (play.session.verdict.reward, play.session.verdict.success) == (1.0, True)
        assert play.session.verdict.raw["claimed"] is True
        content = ui.text()
        assert " PASSED    reward 1" in content
        assert "calls" in content
        await ui.press("n")
        await ui.screen(TasksScreen)


@pytest.mark.long
async def test_running_call_shows_progress_and_can_be_cancelled(sessions: SessionManager) -> None:
    async with running_player(sessions, task="find-answer") as ui:
        play = await ui.wait_until_open()
        await ui.open("probe__count")
        await ui.type("2")
        await ui.press("tab")
        await ui.type("600")
        await ui.press("ctrl+r")
        await ui.screen(PlayScreen)
        await ui.until(lambda: "at 1" in ui.text(".state"))
        await _footer_shows(ui, "x Cancel", "c Claim", "^c Leave")
        assert "1 running" in ui.text("#status")
        await ui.press("x")
        await ui.wait_for_calls(play.session, 1)
        assert "cancelled after" in ui.text(".state")
        await ui.open("probe__bare")
        await ui.press("ctrl+r")
        await ui.wait_for_calls(play.session, 2)
        assert play.session.calls[1].reply is not None
        assert play.session.phase is Phase.PLAYING


@pytest.mark.long
async def test_invalid_arguments_are_marked_and_not_sent(sessions: SessionManager) -> None:
    async with running_player(sessions, task="tune-reactor") as ui:
        play = await ui.wait_until_open()
        await ui.open("run_simulation")
        await ui.type("hot")
        await ui.press("enter")
        await ui.type("120")
        await ui.press("ctrl+r")
        assert isinstance(ui.app.screen, FormScreen)
        assert ui.text(".error").split("\n") == ["✗ at most 95", "✗ required"]
        assert "2 fields are invalid" in ui.text("#message")
        focused = ui.app.focused
        assert isinstance(focused, Input)
        assert focused.value == "120"
        await ui.press("backspace")
        assert ui.text(".error") == "✗ required"
        assert play.session.calls == []
        await ui.press("escape")
        form = await ui.open("run_simulation")
        assert [item.value for item in form.query(Input)] == ["hot", "12", ""]


@pytest.mark.long
async def test_json_replaces_a_form(sessions: SessionManager) -> None:
    async with running_player(sessions, task="find-answer") as ui:
        play = await ui.wait_until_open()
        form = await ui.open("probe__echo")
        await ui.type("one")
        await ui.press("ctrl+t")
        area = form.query_one("#json", TextArea)
        assert json.loads(area.text) == {"text": "one"}
        area.text = '{"text": "two", "more": [1]}'
        await ui.press("ctrl+t")
        assert "unknown field more" in ui.text("#message")
        await ui.press("ctrl+r")
        await ui.wait_for_calls(play.session, 1)
        assert play.session.calls[0].arguments == {"text": "two", "more": [1]}
        await ui.open("probe__echo")
        assert ui.app.screen.query_one("#json", TextArea).text.startswith('{"text": "two"')
        ui.app.screen.query_one("#json", TextArea).text = "[1"
        await ui.press("ctrl+r")
        assert "not JSON" in ui.text("#message")


@pytest.mark.long
async def test_long_replies_fold_and_failures_show(sessions: SessionManager) -> None:
    async with running_player(sessions, task="find-answer") as ui:
        play = await ui.wait_until_open()
        await ui.open("probe__shell")
        await ui.type("seq 300")
        await ui.press("ctrl+r")
        await ui.wait_for_calls(play.session, 1)
        entry = ui.app.screen.query_one(Entry)
        await ui.until(lambda: entry.has_focus)
        assert "more lines: enter unfolds" in ui.text(".reply")
        await ui.press("enter")
        assert "300" in ui.text(".reply")
        await ui.press("v")
        view = await ui.screen(ViewScreen)
        assert '"exit_code": 0' in view.query_one(TextArea).text
        await ui.press("escape")
        await ui.screen(PlayScreen)
        await ui.open("probe__fail")
        await ui.press("ctrl+r")
        await ui.wait_for_calls(play.session, 2)
        assert "✗ failed" in ui.text(".state")
        await ui.open("probe__refuse")
        await ui.press("ctrl+r")
        await ui.wait_for_calls(play.session, 3)
        assert play.session.calls[2].error
        assert play.session.phase is Phase.PLAYING


@pytest.mark.long
async def test_leaving_asks_while_an_attempt_runs_and_ctrl_c_twice_leaves(
    sessions: SessionManager,
) -> None:
    async with running_player(sessions, task="find-answer") as ui:
        play = await ui.wait_until_open()
        assert play.session.calls == []
        await ui.press("escape")
        await ui.screen(AskScreen)
        await ui.press("n")
        await ui.screen(PlayScreen)
        await ui.press("escape", "y")
        await ui.screen(TasksScreen)
        await ui.until(lambda: play.session.closed)
        await ui.press(*"find-answer", "enter")
        play = await ui.wait_until_open()
        assert play.session.task == "find-answer"
        await ui.press("ctrl+c", "ctrl+c")
        await ui.until(lambda: not ui.app.is_running)
        play.session.leave()


async def test_failed_set_up_shows_its_cause(sessions: SessionManager) -> None:
    async with running_player(sessions, task="failing-preprocess") as ui:
        play = await ui.screen(PlayScreen)
        await ui.until(lambda: play.session.phase is Phase.OVER and "is over" in ui.text("#words"))
        assert play.session.error in " ".join(ui.text("#words").split())
        await ui.press("escape")
        await ui.screen(TasksScreen)


@pytest.mark.long
async def test_forfeited_attempt_is_shown_with_its_reason(sessions: SessionManager) -> None:
    async with running_player(sessions, task="crashing-verdict") as ui:
        await ui.wait_until_open()
        await ui.claim("")
        content = ui.text()
        assert "FORFEITED" in content
        assert "was killed: signal 9" in content


async def test_missing_verdict_is_not_shown_as_zero(sessions: SessionManager) -> None:
    async with running_player(sessions, task="lost-verdict") as ui:
        await ui.wait_until_open()
        await ui.claim("")
        content = ui.text()
        assert "NO VERDICT" in content
        assert "reward" not in content


async def test_search_filters_tasks(sessions: SessionManager) -> None:
    async with running_player(sessions) as ui:
        tasks = await ui.screen(TasksScreen)
        await ui.until(lambda: tasks.shown)
        assert {"tune-reactor", "find-answer"} <= set(tasks.shown)
        await ui.type("catalyst starter")
        await ui.until(lambda: tasks.shown == ["tune-reactor"])
        await ui.type(" zebra")
        await ui.until(lambda: tasks.shown == [])
        assert "No task matches" in ui.text("#prompt")
        await ui.press("enter")
        assert isinstance(ui.app.screen, TasksScreen)


async def test_enter_in_a_search_opens_what_was_typed_before_it(sessions: SessionManager) -> None:
    async with running_player(sessions) as ui:
        await ui.screen(TasksScreen)
        for key in (*"catalyst", "enter"):  # as a fast typist: without a pause between the keys
            ui.app.post_message(Key(key, key if len(key) == 1 else None))
        play = await ui.wait_until_open()
        assert play.session.task == "tune-reactor"
        await ui.press("slash")
        for key in (*"simulation", "enter"):
            ui.app.post_message(Key(key, key if len(key) == 1 else None))
        form = await ui.screen(FormScreen)
        assert "lab__run_simulation" in str(form.query_one(".bar", Static).render())


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x40"])
async def test_nothing_overflows_and_the_footer_lists_every_key(
    sessions: SessionManager, size: tuple[int, int]
) -> None:
    async with running_player(sessions, size=size, task="find-answer") as ui:
        await ui.wait_until_open()
        await _footer_shows(ui, "/ Search", "c Claim", "esc Tasks", "^c Leave")
        assert ui.app.screen.query_one("#tools", OptionList).region.bottom <= size[1] - 1
        await ui.open("probe__count")
        await _footer_shows(ui, "^r Call", "^t JSON", "^o Editor", "esc Back", "^c Leave")
        await ui.press("escape", "c")
        await _footer_shows(ui, "^r Claim", "esc Back")
        await ui.press("escape")
        await ui.screen(PlayScreen)
        await ui.press("t")
        assert ui.app.screen.query_one("#task-pane").display is (size == LARGE)
        await _footer_shows(ui, "t Task", "c Claim", "^c Leave")


async def _footer_shows(ui: Ui, *keys: str) -> None:
    await ui.until(lambda: all(key in ui.footer() for key in keys))
    assert ui.cut() == []


async def test_key_switches_between_dark_and_light(sessions: SessionManager) -> None:
    async with running_player(sessions) as ui:
        await ui.screen(TasksScreen)
        assert ui.app.current_theme.dark
        await ui.press("ctrl+l")
        assert not ui.app.current_theme.dark
