"""Fields as widgets. Each knows its draft, on the screen or not, and says at its place what does not fit."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input, Select, Static, TextArea

from decathlon_client.player.draft import Draft
from decathlon_client.player.fault import Path
from decathlon_client.player.field import Field, Kind, shown
from decathlon_client.player.saying import clean

Faults = Mapping[Path, str]
CHOICE_CHARACTERS = 60
NOTHING = "not sent"


class FieldView(Vertical):
    """A field: its label, what it is filled in with, what does not fit."""

    def __init__(self, field: Field, *, label: str | None = None) -> None:
        super().__init__(classes="field")
        self.field = field
        self._label = field.name if label is None else label
        self._fault = ""

    @property
    def draft(self) -> Draft:
        raise NotImplementedError

    def show_faults(self, faults: Faults, path: Path) -> None:
        """Say what does not fit, here and below."""
        self._say(faults.get(path, ""))

    @on(Input.Changed)
    @on(TextArea.Changed)
    @on(Select.Changed)
    def _touched(self) -> None:
        """What was said is out of date."""
        self._say("")

    def _say(self, fault: str) -> None:
        self._fault = fault
        for shown_fault in self.query_children(".fault").results(Static):
            shown_fault.update(Text(f"✗ {self._fault}"))
            shown_fault.display = bool(self._fault)

    def first_fault(self) -> FieldView | None:
        """The topmost field with a fault, this one or one below."""
        below = (found for each in self.views() if (found := each.first_fault()) is not None)
        return self if self._fault else next(below, None)

    def views(self) -> list[FieldView]:
        """The fields in it."""
        return []

    def compose(self) -> ComposeResult:
        if self._label or self.field.description:
            yield Static(self._heading(), classes="label")
        yield from self.body()
        fault = Static("", classes="fault")
        fault.display = False
        yield fault

    def body(self) -> ComposeResult:
        yield from ()

    def _heading(self) -> Text:
        field = self.field
        told = Text.assemble(
            (clean(self._label), "bold"), ("* " if field.required and self._label else " ", "bold red")
        )
        told.append(field.hint, "italic")
        if field.has_default:
            told.append(f", default {clean(shown(field.default))[:CHOICE_CHARACTERS]}", "italic")
        if field.description:
            told.append(f"  {clean(field.description)}", "dim")
        return told


class TextView(FieldView):
    """Text, numbers, JSON: whatever is typed."""

    def __init__(self, field: Field, draft: str, *, label: str | None = None) -> None:
        super().__init__(field, label=label)
        self._input: Input | TextArea = self._made(draft)

    @property
    def draft(self) -> str:
        return self._input.value if isinstance(self._input, Input) else self._input.text

    def body(self) -> ComposeResult:
        yield self._input

    def _made(self, text: str) -> Input | TextArea:
        if self.field.kind in (Kind.LONG_TEXT, Kind.JSON) or "\n" in text:
            return TextArea(text, compact=True, classes="long")
        return _Line(text, compact=True)

    @property
    def text_input(self) -> Input | TextArea:
        return self._input

    async def write(self, text: str) -> None:
        """Put a text in, several lines where it has them."""
        if isinstance(self._input, TextArea):
            self._input.text = text
            return
        old, self._input = self._input, self._made(text)
        await self.mount(self._input, after=old)
        await old.remove()
        self._input.focus()
        if isinstance(self._input, TextArea):
            self._input.move_cursor(self._input.document.end)


class _Line(Input):
    """One line; what is pasted keeps its lines."""

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
    """One of several values."""

    def __init__(self, field: Field, draft: int | None, *, label: str | None = None) -> None:
        super().__init__(field, label=label)
        self._index = draft

    @property
    def draft(self) -> int | None:
        return self._index

    def body(self) -> ComposeResult:
        told = [
            (clean(shown(each))[:CHOICE_CHARACTERS] or '""', n) for n, each in enumerate(self.field.choices)
        ]
        yield select_of(told, self._index, self._prompt())

    def _prompt(self) -> str:
        """What is done where nothing is chosen."""
        field = self.field
        if field.has_default:
            return f"{clean(shown(field.default))[:CHOICE_CHARACTERS]} (default)"
        return "choose …" if field.required and not field.nullable else NOTHING

    @on(Select.Changed)
    def _chosen(self, event: Select.Changed) -> None:
        event.stop()
        self._index = None if event.value is Select.NULL else int(str(event.value))


def select_of(told: list[tuple[str, int]], index: int | None, prompt: str) -> Select[int]:
    """A choice of texts by their numbers."""
    return Select(
        [(Text(text), number) for text, number in told],
        prompt=prompt,
        value=Select.NULL if index is None else index,
        compact=True,
    )
