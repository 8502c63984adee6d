"""Fields that hold fields: groups, lists, and values of one of several kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widget import Widget
from textual.widgets import Button, Select

from decathlon_client.player.draft import Draft, blank, touched
from decathlon_client.player.fault import Path
from decathlon_client.player.field import Field, Kind
from decathlon_client.player.field_view import NOTHING, ChoiceView, Faults, FieldView, TextView, select_of


class ObjectView(FieldView):
    """A group of fields; one that is not required is closed until it is wanted."""

    def __init__(self, field: Field, draft: Mapping[str, Draft], *, label: str | None = None) -> None:
        super().__init__(field, label=label)
        self._views = [view_of(each, draft[each.name]) for each in field.fields]
        self._open = field.required or touched(field, draft)

    @property
    def draft(self) -> dict[str, Draft]:
        return {view.field.name: view.draft for view in self._views}

    def views(self) -> list[FieldView]:
        return self._views

    def body(self) -> ComposeResult:
        if self._open:
            yield Vertical(*self._views, classes="group" if self._label else "fields")
        else:
            yield Button(f"▸ {len(self._views)} fields", compact=True, classes="opens")

    @on(Button.Pressed, ".opens")
    async def _opened(self, event: Button.Pressed) -> None:
        event.stop()
        self._open = True
        group = Vertical(*self._views, classes="group")
        await self.mount(group, after=event.button)
        focus_in(group)
        await event.button.remove()

    def show_faults(self, faults: Faults, path: Path) -> None:
        super().show_faults(faults, path)
        for view in self._views:
            view.show_faults(faults, (*path, view.field.name))


class ArrayView(FieldView):
    """A list: each of its items with a way to take it out, and a way to add one."""

    def __init__(self, field: Field, draft: list[Draft], *, label: str | None = None) -> None:
        super().__init__(field, label=label)
        assert field.items is not None
        self._items = field.items
        self._rows = [_Row(view_of(field.items, each, label="")) for each in draft]

    @property
    def draft(self) -> list[Draft]:
        return [row.view.draft for row in self._rows]

    def views(self) -> list[FieldView]:
        return [row.view for row in self._rows]

    def body(self) -> ComposeResult:
        with Vertical(classes="group"):
            yield from self._rows
            yield Button("+ add", compact=True, classes="adds")

    @on(Button.Pressed, ".adds")
    async def _added(self, event: Button.Pressed) -> None:
        event.stop()
        row = _Row(view_of(self._items, blank(self._items), label=""))
        self._rows.append(row)
        await self.query_children(".group").first().mount(row, before=event.button)
        focus_in(row.view)

    @on(Button.Pressed, ".removes")
    async def _removed(self, event: Button.Pressed) -> None:
        row = event.button.parent
        if isinstance(row, _Row) and row in self._rows:
            event.stop()
            self.screen.focus_next()
            self._rows.remove(row)
            await row.remove()

    def show_faults(self, faults: Faults, path: Path) -> None:
        super().show_faults(faults, path)
        for number, row in enumerate(self._rows):
            row.view.show_faults(faults, (*path, number))


class _Row(Horizontal):
    """An item of a list."""

    def __init__(self, view: FieldView) -> None:
        super().__init__(classes="row")
        self.view = view

    def compose(self) -> ComposeResult:
        yield self.view
        yield Button("✕", compact=True, classes="removes")


class UnionView(FieldView):
    """A value of one of several kinds: which, and then that."""

    def __init__(self, field: Field, draft: tuple[int | None, Draft], *, label: str | None = None) -> None:
        super().__init__(field, label=label)
        self._index, inner = draft
        self._inner = None if self._index is None else view_of(field.options[self._index], inner, label="")

    @property
    def draft(self) -> tuple[int | None, Draft]:
        return (self._index, None if self._inner is None else self._inner.draft)

    def views(self) -> list[FieldView]:
        return [] if self._inner is None else [self._inner]

    def body(self) -> ComposeResult:
        told = [(_option(each), n) for n, each in enumerate(self.field.options)]
        yield select_of(told, self._index, "choose …" if self.field.required else NOTHING)
        with Vertical(classes="group"):
            if self._inner is not None:
                yield self._inner

    @on(Select.Changed)
    async def _chosen(self, event: Select.Changed) -> None:
        if event.select.parent is not self:
            return
        event.stop()
        index = None if event.value is Select.NULL else int(str(event.value))
        if index == self._index:
            return
        self._index = index
        place = self.query_children(".group").first()
        await place.remove_children()
        option = None if index is None else self.field.options[index]
        self._inner = None if option is None else view_of(option, blank(option), label="")
        if self._inner is not None:
            await place.mount(self._inner)

    def show_faults(self, faults: Faults, path: Path) -> None:
        if self._inner is None:
            super().show_faults(faults, path)
        else:
            super().show_faults({}, path)
            self._inner.show_faults(faults, path)


def _option(option: Field) -> str:
    return f"{option.name}: {option.hint}" if option.name else option.hint


def view_of(field: Field, draft: Any, *, label: str | None = None) -> FieldView:
    """The widget for a field."""
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


def focus_in(widget: Widget) -> None:
    """Put the focus on the first thing in it that can have it."""
    for each in widget.query("*"):
        if each.focusable:
            each.focus()
            return
