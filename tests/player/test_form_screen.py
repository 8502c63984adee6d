"""Form screen: every kind of field, filled in with keys."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from decathlon_client import Tool
from decathlon_client.player.form_screen import FormScreen, SavedForm
from decathlon_client.player.screens import EditScreen
from textual.app import App
from textual.widgets import Button, Input, OptionList, Select, TextArea

from tests.player.conftest import SMALL, Ui

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
    """An application with a single form, in the player's style."""

    CSS_PATH = STYLES
    called: dict[str, Any] | None = None

    def __init__(self, schema: dict[str, Any]) -> None:
        super().__init__()
        self.form = FormScreen(Tool.read({"name": "draw", "inputSchema": schema}), SavedForm())

    def on_mount(self) -> None:
        def done(arguments: dict[str, Any] | None) -> None:
            self.called = arguments

        self.push_screen(self.form, done)


async def test_every_kind_of_field_is_filled_in_with_keys() -> None:
    app = Alone(SCHEMA)
    async with app.run_test(size=SMALL) as pilot:
        ui = Ui(app, pilot)
        await ui.screen(FormScreen)
        await ui.until(lambda: isinstance(app.focused, Input))
        assert "[brackets]" in ui.text(".label")
        await ui.type("a.png")
        await ui.press("enter")
        await _choose(ui, 2)
        await ui.press("tab", "enter")
        await ui.until(lambda: isinstance(app.focused, Input))
        await ui.type("red")
        await ui.press("tab", "tab")
        assert isinstance(app.focused, Button)
        await ui.press("tab", "enter")
        await ui.until(lambda: isinstance(app.focused, Select))
        await _choose(ui, 1)
        await ui.press("tab")
        await _choose(ui, 1)
        await ui.press("tab")
        await ui.until(lambda: isinstance(app.focused, Input))
        await ui.type("three")
        await ui.press("tab")
        assert isinstance(app.focused, TextArea)
        await ui.type("one\ntwo")
        await ui.press("ctrl+r")
        assert ui.text(".error") == "✗ not a whole number"
        assert isinstance(app.focused, Input)
        app.focused.value = "3"
        await ui.press("ctrl+r")
        await ui.until(lambda: app.called is not None)
    assert app.called == {
        "path": "a.png",
        "mode": "values",
        "tags": ["red"],
        "style": {"bold": True},
        "end": {"n": 3},
        "text": "one\ntwo",
    }


async def _choose(ui: Ui, number: int) -> None:
    """Open the focused drop-down and choose the entry of that number; 0 is the empty one."""
    assert isinstance(ui.app.focused, Select)
    await ui.press("enter")
    await ui.until(lambda: isinstance(ui.app.focused, OptionList))
    await ui.press("home", *["down"] * number, "enter")
    await ui.until(lambda: isinstance(ui.app.focused, Select))


async def test_editor_keeps_pasted_lines() -> None:
    app = Alone({"type": "object", "properties": {"note": {"type": "string"}}})
    async with app.run_test(size=SMALL) as pilot:
        ui = Ui(app, pilot)
        await ui.until(lambda: isinstance(app.focused, Input))
        await ui.type("one")
        await ui.press("ctrl+o")
        await ui.screen(EditScreen)
        await ui.type("\ntwo")
        await ui.press("ctrl+r")
        await ui.screen(FormScreen)
        await ui.until(lambda: isinstance(app.focused, TextArea))
        await ui.press("ctrl+r")
        await ui.until(lambda: app.called is not None)
        assert app.called == {"note": "one\ntwo"}


async def test_single_line_input_keeps_pasted_lines() -> None:
    app = Alone({"type": "object", "properties": {"note": {"type": "string"}}})
    async with app.run_test(size=SMALL) as pilot:
        ui = Ui(app, pilot)
        await ui.until(lambda: isinstance(app.focused, Input))
        await ui.type("one\ntwo")
        await ui.until(lambda: isinstance(app.focused, TextArea))
        await ui.press("ctrl+r")
        await ui.until(lambda: app.called is not None)
    assert app.called == {"note": "one\ntwo"}


async def test_list_item_can_be_removed() -> None:
    app = Alone({"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}}})
    async with app.run_test(size=SMALL) as pilot:
        ui = Ui(app, pilot)
        await ui.until(lambda: isinstance(app.focused, Button))
        for count, name in enumerate(("a", "b"), 1):
            await _press(ui, ".adds")
            # The focus moves after the new row is mounted: wait for its own input, not for any.
            await ui.until(lambda: len(app.screen.query(Input)) == count)  # noqa: B023
            await ui.until(lambda: app.focused is app.screen.query(Input).last())
            await ui.type(name)
        await _press(ui, ".removes")
        await ui.until(lambda: len(app.screen.query(".removes")) == 1)
        await ui.press("ctrl+r")
        await ui.until(lambda: app.called is not None)
    assert app.called == {"tags": ["b"]}


async def _press(ui: Ui, selector: str) -> None:
    """Press the first button that matches, once it has the focus."""
    button = ui.app.screen.query(selector).first(Button)
    button.focus()
    await ui.until(lambda: ui.app.focused is button)
    await ui.press("enter")
