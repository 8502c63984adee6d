"""Widgets for form fields: text, choice, group, list, union.

Each widget knows its draft, mounted or not, and shows validation errors next to the input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widget import Widget
from textual.widgets import Button, Input, Select, Static, TextArea

from decathlon_client.forms.schema import Field, Kind, display_value
from decathlon_client.forms.values import Draft, Path, empty_draft, is_filled
from decathlon_client.player.rendering import sanitize

MessagesByPath = Mapping[Path, str]
CHOICE_CHARACTERS = 60
NOT_SENT = "not sent"


class FieldView(Vertical):
    """Base widget of a field: label, input, error message."""

    def __init__(self, field: Field, *, label: str | None = None) -> None:
        super().__init__(classes="field")
        self.field = field
        self._label = field.name if label is None else label
        self._error = ""

    @property
    def draft(self) -> Draft:
        raise NotImplementedError

    def show_errors(self, errors: MessagesByPath, path: Path) -> None:
        """Show the errors of this field and of nested fields."""
        self._show_error(errors.get(path, ""))

    @on(Input.Changed)
    @on(TextArea.Changed)
    @on(Select.Changed)
    def _clear_message(self) -> None:
        """An edit makes the shown error obsolete."""
        self._show_error("")

    def _show_error(self, message: str) -> None:
        self._error = message
        for error_label in self.query_children(".error").results(Static):
            error_label.update(Text(f"✗ {self._error}"))
            error_label.display = bool(self._error)

    def first_invalid(self) -> FieldView | None:
        """The first field with an error: this one or a nested one."""
        nested = (found for item in self.nested_views() if (found := item.first_invalid()) is not None)
        return self if self._error else next(nested, None)

    def nested_views(self) -> list[FieldView]:
        """Nested fields."""
        return []

    def compose(self) -> ComposeResult:
        if self._label or self.field.description:
            yield Static(self._heading(), classes="label")
        yield from self.body()
        message = Static("", classes="error")
        message.display = False
        yield message

    def body(self) -> ComposeResult:
        yield from ()

    def _heading(self) -> Text:
        field = self.field
        heading = Text.assemble(
            (sanitize(self._label), "bold"), ("* " if field.required and self._label else " ", "bold red")
        )
        heading.append(field.hint, "italic")
        if field.has_default:
            heading.append(
                f", default {sanitize(display_value(field.default))[:CHOICE_CHARACTERS]}", "italic"
            )
        if field.description:
            heading.append(f"  {sanitize(field.description)}", "dim")
        return heading


class TextView(FieldView):
    """Typed input: text, numbers, JSON."""

    def __init__(self, field: Field, draft: str, *, label: str | None = None) -> None:
        super().__init__(field, label=label)
        self._input: Input | TextArea = self._make_input(draft)

    @property
    def draft(self) -> str:
        return self._input.value if isinstance(self._input, Input) else self._input.text

    def body(self) -> ComposeResult:
        yield self._input

    def _make_input(self, text: str) -> Input | TextArea:
        if self.field.kind in (Kind.LONG_TEXT, Kind.JSON) or "\n" in text:
            return TextArea(text, compact=True, classes="long")
        return SingleLineInput(text, compact=True)

    async def write(self, text: str) -> None:
        """Replace the text; a multi-line text gets a multi-line input."""
        if isinstance(self._input, TextArea):
            self._input.text = text
            return
        old, self._input = self._input, self._make_input(text)
        await self.mount(self._input, after=old)
        await old.remove()
        self._input.focus()
        if isinstance(self._input, TextArea):
            self._input.move_cursor(self._input.document.end)


class SingleLineInput(Input):
    """A single-line input. Pasting several lines turns it into a multi-line input."""

    async def action_submit(self) -> None:
        self.screen.focus_next()

    def _on_paste(self, event: events.Paste) -> None:
        if "\n" not in event.text.strip("\n") or not isinstance(self.parent, TextView):
            return
        event.prevent_default()
        event.stop()
        at = self.cursor_position
        self.screen.run_worker(self.parent.write(self.value[:at] + event.text + self.value[at:]))


class ChoiceView(FieldView):
    """Choice between fixed values."""

    def __init__(self, field: Field, draft: int | None, *, label: str | None = None) -> None:
        super().__init__(field, label=label)
        self._index = draft

    @property
    def draft(self) -> int | None:
        return self._index

    def body(self) -> ComposeResult:
        heading = [
            (sanitize(display_value(item))[:CHOICE_CHARACTERS] or '""', n)
            for n, item in enumerate(self.field.choices)
        ]
        yield make_select(heading, self._index, self._prompt())

    def _prompt(self) -> str:
        """Text shown while nothing is chosen."""
        field = self.field
        if field.has_default:
            return f"{sanitize(display_value(field.default))[:CHOICE_CHARACTERS]} (default)"
        return "choose …" if field.required and not field.nullable else NOT_SENT

    @on(Select.Changed)
    def _on_choice(self, event: Select.Changed) -> None:
        event.stop()
        self._index = None if event.value is Select.NULL else int(str(event.value))


def make_select(heading: list[tuple[str, int]], index: int | None, prompt: str) -> Select[int]:
    """A drop-down of texts; its values are their numbers."""
    return Select(
        [(Text(text), number) for text, number in heading],
        prompt=prompt,
        value=Select.NULL if index is None else index,
        compact=True,
    )


class ObjectView(FieldView):
    """A group of fields. An optional group stays collapsed until the user opens it."""

    def __init__(self, field: Field, draft: Mapping[str, Draft], *, label: str | None = None) -> None:
        super().__init__(field, label=label)
        self._views = [make_view(item, draft[item.name]) for item in field.fields]
        self._open = field.required or is_filled(field, draft)

    @property
    def draft(self) -> dict[str, Draft]:
        return {view.field.name: view.draft for view in self._views}

    def nested_views(self) -> list[FieldView]:
        return self._views

    def body(self) -> ComposeResult:
        if self._open:
            yield Vertical(*self._views, classes="group" if self._label else "fields")
        else:
            yield Button(f"▸ {len(self._views)} fields", compact=True, classes="opens")

    @on(Button.Pressed, ".opens")
    async def _on_open(self, event: Button.Pressed) -> None:
        event.stop()
        self._open = True
        group = Vertical(*self._views, classes="group")
        await self.mount(group, after=event.button)
        focus_first(group)
        await event.button.remove()

    def show_errors(self, errors: MessagesByPath, path: Path) -> None:
        super().show_errors(errors, path)
        for view in self._views:
            view.show_errors(errors, (*path, view.field.name))


class ArrayView(FieldView):
    """A list with buttons to remove each item and to add one."""

    def __init__(self, field: Field, draft: list[Draft], *, label: str | None = None) -> None:
        super().__init__(field, label=label)
        assert field.items is not None
        self._items = field.items
        self._rows = [_Row(make_view(field.items, item, label="")) for item in draft]

    @property
    def draft(self) -> list[Draft]:
        return [row.view.draft for row in self._rows]

    def nested_views(self) -> list[FieldView]:
        return [row.view for row in self._rows]

    def body(self) -> ComposeResult:
        with Vertical(classes="group"):
            yield from self._rows
            yield Button("+ add", compact=True, classes="adds")

    @on(Button.Pressed, ".adds")
    async def _on_add(self, event: Button.Pressed) -> None:
        event.stop()
        row = _Row(make_view(self._items, empty_draft(self._items), label=""))
        self._rows.append(row)
        await self.query_children(".group").first().mount(row, before=event.button)
        focus_first(row.view)

    @on(Button.Pressed, ".removes")
    async def _on_remove(self, event: Button.Pressed) -> None:
        row = event.button.parent
        if isinstance(row, _Row) and row in self._rows:
            event.stop()
            self.screen.focus_next()
            self._rows.remove(row)
            await row.remove()

    def show_errors(self, errors: MessagesByPath, path: Path) -> None:
        super().show_errors(errors, path)
        for number, row in enumerate(self._rows):
            row.view.show_errors(errors, (*path, number))


class _Row(Horizontal):
    """One list item with its remove button."""

    def __init__(self, view: FieldView) -> None:
        super().__init__(classes="row")
        self.view = view

    def compose(self) -> ComposeResult:
        yield self.view
        yield Button("✕", compact=True, classes="removes")


class UnionView(FieldView):
    """A union: first the kind, then the value."""

    def __init__(self, field: Field, draft: tuple[int | None, Draft], *, label: str | None = None) -> None:
        super().__init__(field, label=label)
        self._index, inner = draft
        self._inner = None if self._index is None else make_view(field.options[self._index], inner, label="")

    @property
    def draft(self) -> tuple[int | None, Draft]:
        return (self._index, None if self._inner is None else self._inner.draft)

    def nested_views(self) -> list[FieldView]:
        return [] if self._inner is None else [self._inner]

    def body(self) -> ComposeResult:
        heading = [(_option(item), n) for n, item in enumerate(self.field.options)]
        yield make_select(heading, self._index, "choose …" if self.field.required else NOT_SENT)
        with Vertical(classes="group"):
            if self._inner is not None:
                yield self._inner

    @on(Select.Changed)
    async def _on_choice(self, event: Select.Changed) -> None:
        if event.select.parent is not self:
            return
        event.stop()
        index = None if event.value is Select.NULL else int(str(event.value))
        if index == self._index:
            return
        self._index = index
        container = self.query_children(".group").first()
        await container.remove_children()
        option = None if index is None else self.field.options[index]
        self._inner = None if option is None else make_view(option, empty_draft(option), label="")
        if self._inner is not None:
            await container.mount(self._inner)

    def show_errors(self, errors: MessagesByPath, path: Path) -> None:
        if self._inner is None:
            super().show_errors(errors, path)
        else:
            super().show_errors({}, path)
            self._inner.show_errors(errors, path)


def _option(option: Field) -> str:
    return f"{option.name}: {option.hint}" if option.name else option.hint


def make_view(field: Field, draft: Any, *, label: str | None = None) -> FieldView:
    """Make the widget for a field."""
    match field.kind:
        case Kind.CHOICE:
            return ChoiceView(field, draft, label=label)
        case Kind.OBJECT:
            return ObjectView(field, draft, label=label)
        case Kind.ARRAY:
            return ArrayView(field, draft, label=label)
        case Kind.UNION:
            return UnionView(field, draft, label=label)
        case _:
            return TextView(field, draft, label=label)


def focus_first(widget: Widget) -> None:
    """Focus the first focusable descendant."""
    for item in widget.query("*"):
        if item.focusable:
            item.focus()
            return
