"""Screens that hold one text: to be read, to be written, to be said yes or no to."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Footer, Static, TextArea

from decathlon_client.player.page import Page


class ViewScreen(Page[None]):
    """A long text, to be read and copied."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,v", "back", "Back", key_display="esc")]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(self._title, classes="bar", markup=False)
        yield TextArea(self._text, read_only=True, compact=True, show_cursor=False)
        yield Footer(show_command_palette=False, compact=True)

    def action_back(self) -> None:
        self.dismiss(None)


class EditScreen(Page[str | None]):
    """A text, to be written; None where it is left as it was."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "done", "Done", priority=True),
        Binding("escape", "back", "Back", key_display="esc", priority=True),
    ]

    def __init__(self, title: str, text: str, said: str = "", *, done: str = "Done") -> None:
        super().__init__()
        self._title = title
        self._text = text
        self._said = said
        self._bindings.key_to_bindings["ctrl+r"] = [Binding("ctrl+r", "done", done, priority=True)]

    def compose(self) -> ComposeResult:
        yield Static(self._title, classes="bar", markup=False)
        if self._said:
            yield Static(self._said, classes="said", markup=False)
        yield TextArea(self._text, compact=True)
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        area = self.query_one(TextArea)
        area.move_cursor(area.document.end)

    def action_done(self) -> None:
        self.dismiss(self.query_one(TextArea).text)

    def action_back(self) -> None:
        self.dismiss(None)


class AskScreen(ModalScreen[bool]):
    """A question. Ctrl-C is a yes: whoever presses it twice wants to go."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,enter", "say(True)", "Yes", key_display="y"),
        Binding("n,escape", "say(False)", "No", key_display="n"),
        Binding("ctrl+c,ctrl+q", "say(True)", show=False, priority=True),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(id="question"):
            yield Static(self._question, markup=False)
            yield Static("y  yes      n  no", classes="dim", markup=False)

    def action_say(self, answer: bool) -> None:
        self.dismiss(answer)
