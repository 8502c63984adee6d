"""The form for a tool call, made from its schema, with JSON as the alternative."""

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
from decathlon_client.forms.schema import Kind, form_from_schema
from decathlon_client.forms.values import (
    Draft,
    NotRepresentableError,
    Path,
    Violation,
    draft_from_value,
    empty_draft,
    partial_value,
    read_draft,
)
from decathlon_client.player.form_widgets import FieldView, TextView, focus_first, make_view
from decathlon_client.player.rendering import sanitize, unwrap
from decathlon_client.player.screens import EditScreen, PlayerScreen
from decathlon_client.values import JsonObject, as_object


@dataclass(slots=True)
class SavedForm:
    """Content of a form when it was last left: a draft, or JSON text."""

    draft: Draft = None
    text: str | None = None


class FormScreen(PlayerScreen[JsonObject | None]):
    """Asks for the arguments of a call; the result is None if the user goes back. Keeps input in `saved`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "call", "Call", priority=True),
        Binding("ctrl+t", "json", "JSON/form", priority=True),
        Binding("ctrl+o", "editor", "Editor", priority=True),
        Binding("tab", "app.focus_next", "Next", show=True),
        Binding("escape", "back", "Back", key_display="esc"),
    ]

    def __init__(self, tool: Tool, saved: SavedForm) -> None:
        super().__init__()
        self._tool = tool
        self._saved = saved
        self._form = form_from_schema(tool.input_schema)
        self._view: FieldView | None = None
        self._json_area: TextArea | None = None

    def compose(self) -> ComposeResult:
        yield Static(sanitize(self._tool.name), classes="bar", markup=False)
        with VerticalScroll(id="form", can_focus=False):
            if self._tool.description:
                yield Static(unwrap(self._tool.description), id="description", markup=False)
        yield Static("", id="message")
        yield Footer(show_command_palette=False, compact=True)

    async def on_mount(self) -> None:
        self._show_message("")
        if self._form.kind is Kind.JSON or self._saved.text is not None:
            await self._show_json(self._saved.text or "{}")
        else:
            await self._show_form(empty_draft(self._form) if self._saved.draft is None else self._saved.draft)

    async def _show_form(self, draft: Draft) -> None:
        self._json_area, self._view = None, make_view(self._form, draft)
        container = self.query_one("#form")
        await container.query("#json, .field").remove()
        await container.mount(self._view)
        if not self._form.fields:
            self._show_message("No arguments; ctrl+r calls the tool.", is_error=False)
        focus_first(self._view)

    async def _show_json(self, text: str) -> None:
        self._view, self._json_area = None, TextArea(text, compact=True, id="json")
        container = self.query_one("#form")
        await container.query("#json, .field").remove()
        await container.mount(self._json_area)
        self._json_area.focus()

    @on(Input.Changed)
    @on(TextArea.Changed)
    @on(Select.Changed)
    def _clear_message(self) -> None:
        self._show_message("")

    def _show_message(self, text: str, *, is_error: bool = True) -> None:
        message = self.query_one("#message", Static)
        message.update(Text(sanitize(text), no_wrap=True, overflow="ellipsis"))
        message.display = bool(text)
        message.set_class(is_error, "-error")

    def _save(self) -> None:
        self._saved.text = None if self._json_area is None else self._json_area.text
        if self._view is not None:
            self._saved.draft = self._view.draft

    def action_back(self) -> None:
        self._save()
        self.dismiss(None)

    def action_call(self) -> None:
        arguments = self._from_form() if self._json_area is None else self._from_json()
        if arguments is not None:
            self._save()
            self.dismiss(arguments)

    def _from_json(self) -> JsonObject | None:
        """Any JSON object is accepted; validating it is up to the tool."""
        assert self._json_area is not None
        try:
            found = as_object(json.loads(self._json_area.text or "{}"))
        except ValueError as error:
            self._show_message(f"✗ not JSON: {error}")
            return None
        if found is None:
            self._show_message("✗ the arguments must be a JSON object: { … }")
        return found

    def _from_form(self) -> JsonObject | None:
        assert self._view is not None
        reading = read_draft(self._form, self._view.draft)
        self._show_violations(reading.violations)
        return None if reading.violations else as_object(reading.value)

    def _show_violations(self, violations: tuple[Violation, ...]) -> None:
        assert self._view is not None
        messages: dict[Path, str] = {}
        for is_error in violations:
            messages.setdefault(is_error.path, is_error.message)
        self._view.show_errors(messages, ())
        if not violations:
            self._show_message("")
            return
        invalid_view = self._view.first_invalid()
        summary = f"{len(messages)} fields are invalid" if len(messages) > 1 else "a field is invalid"
        self._show_message(
            f"✗ {summary}; ctrl+t switches to JSON" if invalid_view else f"✗ {violations[0].message}"
        )
        if invalid_view is not None:
            focus_first(invalid_view)
            invalid_view.scroll_visible(animate=False)

    @work(exclusive=True)
    async def action_json(self) -> None:
        self._show_message("")
        if self._json_area is None:
            assert self._view is not None
            value = partial_value(self._form, self._view.draft)
            await self._show_json(json.dumps(value, indent=2, ensure_ascii=False))
            return
        if self._form.kind is Kind.JSON:
            self._show_message("The arguments of this tool can only be given as JSON.")
            return
        arguments = self._from_json()
        if arguments is None:
            return
        try:
            await self._show_form(draft_from_value(self._form, arguments))
        except NotRepresentableError as error:
            self._show_message(f"✗ the form cannot represent this: {error}")

    @work(exclusive=True)
    async def action_editor(self) -> None:
        """Edit the focused text on the whole screen."""
        view = next((item for item in self._focused_path() if isinstance(item, TextView)), None)
        if view is None:
            return
        name = view.field.name or self._tool.name
        text = await self.player_app.push_screen_wait(
            EditScreen(sanitize(f"{self._tool.name}   {name}"), view.draft)
        )
        if text is not None:
            await view.write(text)

    def _focused_path(self) -> list[object]:
        return [] if self.focused is None else list(self.focused.ancestors)
