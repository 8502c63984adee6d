"""A form on the screen: every construct filled in by its keys, and what is called in the end."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from decathlon_client import Tool
from decathlon_client.player.form_screen import FormScreen, Kept
from decathlon_client.player.text_screens import EditScreen
from textual.app import App
from textual.widgets import Button, Input, OptionList, Select, TextArea

from tests.player.conftest import SMALL, Hands

pytestmark = pytest.mark.anyio

STYLES = str(files("decathlon_client.player") / "player.tcss")
AFTER = {"title": "After", "type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
SCHEMA = {
    "type": "object",
    "required": ["path"],
    "properties": {
        "path": {"type": "string", "description": "Where, with [brackets] that are no markup."},
        "mode": {"enum": ["all", "values"], "default": "all"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "style": {"$ref": "#/$defs/Style"},
        "end": {"anyOf": [AFTER, {"title": "On", "type": "string"}]},
        "text": {"type": "string"},
    },
    "$defs": {"Style": {"type": "object", "properties": {"bold": {"type": "boolean"}}}},
}


class Alone(App[None]):
    """One form, in the player's clothes."""

    CSS_PATH = STYLES
    called: dict[str, Any] | None = None

    def __init__(self, schema: dict[str, Any]) -> None:
        super().__init__()
        self.form = FormScreen(Tool.read({"name": "draw", "inputSchema": schema}), Kept())

    def on_mount(self) -> None:
        def done(arguments: dict[str, Any] | None) -> None:
            self.called = arguments

        self.push_screen(self.form, done)


async def test_every_construct_is_filled_in_by_hand_and_called() -> None:
    app = Alone(SCHEMA)
    async with app.run_test(size=SMALL) as pilot:
        hands = Hands(app, pilot)
        await hands.screen(FormScreen)
        await hands.until(lambda: isinstance(app.focused, Input))
        assert "[brackets]" in hands.text(".label")
        await hands.type("a.png")
        await hands.press("enter")
        await _choose(hands, 2)
        await hands.press("tab", "enter")
        await hands.until(lambda: isinstance(app.focused, Input))
        await hands.type("red")
        await hands.press("tab", "tab")
        assert isinstance(app.focused, Button)
        await hands.press("tab", "enter")
        await hands.until(lambda: isinstance(app.focused, Select))
        await _choose(hands, 1)
        await hands.press("tab")
        await _choose(hands, 1)
        await hands.press("tab")
        await hands.until(lambda: isinstance(app.focused, Input))
        await hands.type("three")
        await hands.press("tab")
        assert isinstance(app.focused, TextArea)
        await hands.type("one\ntwo")
        await hands.press("ctrl+r")
        assert hands.text(".fault") == "✗ not a whole number"
        assert isinstance(app.focused, Input)
        app.focused.value = "3"
        await hands.press("ctrl+r")
        await hands.until(lambda: app.called is not None)
    assert app.called == {
        "path": "a.png",
        "mode": "values",
        "tags": ["red"],
        "style": {"bold": True},
        "end": {"n": 3},
        "text": "one\ntwo",
    }


async def _choose(hands: Hands, number: int) -> None:
    """Open the choice that has the focus, and take the entry of that number; 0 is none."""
    assert isinstance(hands.app.focused, Select)
    await hands.press("enter")
    await hands.until(lambda: isinstance(hands.app.focused, OptionList))
    await hands.press("home", *["down"] * number, "enter")
    await hands.until(lambda: isinstance(hands.app.focused, Select))


async def test_long_text_has_an_editor_and_what_is_pasted_keeps_its_lines() -> None:
    app = Alone({"type": "object", "properties": {"note": {"type": "string"}}})
    async with app.run_test(size=SMALL) as pilot:
        hands = Hands(app, pilot)
        await hands.until(lambda: isinstance(app.focused, Input))
        await hands.type("one")
        await hands.press("ctrl+o")
        await hands.screen(EditScreen)
        await hands.type("\ntwo")
        await hands.press("ctrl+r")
        await hands.screen(FormScreen)
        await hands.until(lambda: isinstance(app.focused, TextArea))
        await hands.press("ctrl+r")
        await hands.until(lambda: app.called is not None)
        assert app.called == {"note": "one\ntwo"}


async def test_what_is_pasted_into_a_line_keeps_its_lines() -> None:
    app = Alone({"type": "object", "properties": {"note": {"type": "string"}}})
    async with app.run_test(size=SMALL) as pilot:
        hands = Hands(app, pilot)
        await hands.until(lambda: isinstance(app.focused, Input))
        await hands.type("one\ntwo")
        await hands.until(lambda: isinstance(app.focused, TextArea))
        await hands.press("ctrl+r")
        await hands.until(lambda: app.called is not None)
    assert app.called == {"note": "one\ntwo"}


async def test_an_item_of_a_list_can_be_taken_out_again() -> None:
    app = Alone({"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}}})
    async with app.run_test(size=SMALL) as pilot:
        hands = Hands(app, pilot)
        await hands.until(lambda: isinstance(app.focused, Button))
        for name in ("a", "b"):
            app.screen.query_one(".adds").focus()
            await hands.press("enter")
            await hands.until(lambda: isinstance(app.focused, Input))
            await hands.type(name)
        app.screen.query(".removes").first().focus()
        await hands.press("enter")
        await hands.until(lambda: len(app.screen.query(".removes")) == 1)
        await hands.press("ctrl+r")
        await hands.until(lambda: app.called is not None)
    assert app.called == {"tags": ["b"]}
