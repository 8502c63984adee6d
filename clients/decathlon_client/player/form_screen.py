"""A tool's form, made from its schema; JSON is the way out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Input, Select, Static, TextArea

from decathlon_client import Tool
from decathlon_client.player.draft import Draft, UnfitError, best_effort, blank, draft_of, read
from decathlon_client.player.fault import Fault, Path
from decathlon_client.player.field import Kind, form_of
from decathlon_client.player.field_view import FieldView, TextView
from decathlon_client.player.form_view import focus_in, view_of
from decathlon_client.player.page import Page
from decathlon_client.player.saying import clean, flowing
from decathlon_client.player.text_screens import EditScreen
from decathlon_client.values import JsonObject, as_object


@dataclass(slots=True)
class Kept:
    """What was filled in when the form was last left: a draft, or JSON."""

    draft: Draft = None
    text: str | None = None


class FormScreen(Page[JsonObject | None]):
    """The arguments for a call; None where it is left without one. What was filled in is `kept`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "call", "Call", priority=True),
        Binding("ctrl+t", "json", "JSON/form", priority=True),
        Binding("ctrl+o", "editor", "Editor", priority=True),
        Binding("tab", "app.focus_next", "Next", show=True),
        Binding("escape", "back", "Back", key_display="esc"),
    ]

    def __init__(self, tool: Tool, kept: Kept) -> None:
        super().__init__()
        self._tool = tool
        self._kept = kept
        self._form = form_of(tool.input_schema)
        self._view: FieldView | None = None
        self._json: TextArea | None = None

    def compose(self) -> ComposeResult:
        yield Static(clean(self._tool.name), classes="bar", markup=False)
        with VerticalScroll(id="form", can_focus=False):
            if self._tool.description:
                yield Static(flowing(self._tool.description), id="description", markup=False)
        yield Static("", id="said")
        yield Footer(show_command_palette=False, compact=True)

    async def on_mount(self) -> None:
        self._say("")
        if self._form.kind is Kind.JSON or self._kept.text is not None:
            await self._show_json(self._kept.text or "{}")
        else:
            await self._show_form(blank(self._form) if self._kept.draft is None else self._kept.draft)

    async def _show_form(self, draft: Draft) -> None:
        self._json, self._view = None, view_of(self._form, draft)
        place = self.query_one("#form")
        await place.query("#json, .field").remove()
        await place.mount(self._view)
        if not self._form.fields:
            self._say("It takes no arguments: ctrl+r calls it.", fault=False)
        focus_in(self._view)

    async def _show_json(self, text: str) -> None:
        self._view, self._json = None, TextArea(text, compact=True, id="json")
        place = self.query_one("#form")
        await place.query("#json, .field").remove()
        await place.mount(self._json)
        self._json.focus()

    @on(Input.Changed)
    @on(TextArea.Changed)
    @on(Select.Changed)
    def _touched(self) -> None:
        self._say("")

    def _say(self, text: str, *, fault: bool = True) -> None:
        said = self.query_one("#said", Static)
        said.update(Text(clean(text), no_wrap=True, overflow="ellipsis"))
        said.display = bool(text)
        said.set_class(fault, "-fault")

    def _keep(self) -> None:
        self._kept.text = None if self._json is None else self._json.text
        if self._view is not None:
            self._kept.draft = self._view.draft

    def action_back(self) -> None:
        self._keep()
        self.dismiss(None)

    def action_call(self) -> None:
        arguments = self._from_form() if self._json is None else self._from_json()
        if arguments is not None:
            self._keep()
            self.dismiss(arguments)

    def _from_json(self) -> JsonObject | None:
        """Whatever object it is: what a tool makes of it is the tool's affair."""
        assert self._json is not None
        try:
            found = as_object(json.loads(self._json.text or "{}"))
        except ValueError as error:
            self._say(f"✗ not JSON: {error}")
            return None
        if found is None:
            self._say("✗ a tool's arguments are an object: { … }")
        return found

    def _from_form(self) -> JsonObject | None:
        assert self._view is not None
        reading = read(self._form, self._view.draft)
        self._show_faults(reading.faults)
        return None if reading.faults else as_object(reading.value)

    def _show_faults(self, faults: tuple[Fault, ...]) -> None:
        assert self._view is not None
        told: dict[Path, str] = {}
        for fault in faults:
            told.setdefault(fault.path, fault.message)
        self._view.show_faults(told, ())
        if not faults:
            self._say("")
            return
        at = self._view.first_fault()
        many = f"{len(told)} fields do not fit" if len(told) > 1 else "a field does not fit"
        self._say(f"✗ {many}; ctrl+t writes JSON instead" if at else f"✗ {faults[0].message}")
        if at is not None:
            focus_in(at)
            at.scroll_visible(animate=False)

    @work(exclusive=True)
    async def action_json(self) -> None:
        self._say("")
        if self._json is None:
            assert self._view is not None
            value = best_effort(self._form, self._view.draft)
            await self._show_json(json.dumps(value, indent=2, ensure_ascii=False))
            return
        if self._form.kind is Kind.JSON:
            self._say("This tool's arguments can only be given as JSON.")
            return
        arguments = self._from_json()
        if arguments is None:
            return
        try:
            await self._show_form(draft_of(self._form, arguments))
        except UnfitError as error:
            self._say(f"✗ the form cannot hold this: {error}")

    @work(exclusive=True)
    async def action_editor(self) -> None:
        """The text that is being written, on the whole screen."""
        view = next((each for each in self._focused_path() if isinstance(each, TextView)), None)
        if view is None:
            return
        name = view.field.name or self._tool.name
        text = await self.player.push_screen_wait(
            EditScreen(clean(f"{self._tool.name}   {name}"), view.draft)
        )
        if text is not None:
            await view.write(text)

    def _focused_path(self) -> list[object]:
        return [] if self.focused is None else list(self.focused.ancestors)
