"""What was called and what came of it, one below the other; long replies are folded."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.widgets import ProgressBar, Static

from decathlon_client.player.attempt import Call
from decathlon_client.player.saying import (
    FOLD_LINES,
    OPEN_LINES,
    Part,
    arguments_line,
    clean,
    folded,
    parts_of,
)

ARGUMENT_CHARACTERS = 400


class Entry(Vertical, can_focus=True):
    """One call: what was asked, how it goes, what came."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,space", "fold", "Unfold", key_display="⏎"),
        Binding("v", "view", "View"),
        Binding("x", "cancel", "Cancel"),
    ]

    class Viewed(Message):
        """Somebody wants to see the whole of it."""

        def __init__(self, call: Call) -> None:
            super().__init__()
            self.call = call

    def __init__(self, call: Call) -> None:
        super().__init__(classes="entry")
        self.call = call
        self._open = False

    def compose(self) -> ComposeResult:
        yield Static(self._asked(), classes="asked")
        yield ProgressBar(show_eta=False, classes="progress")
        yield Static("", classes="state")
        yield Static("", classes="reply")

    def on_mount(self) -> None:
        self.show()

    def show(self) -> None:
        """Say how it stands now."""
        call = self.call
        self.set_class(call.running, "-running")
        self.set_class(call.failed, "-failed")
        progress = call.progress
        bar = self.query_one(ProgressBar)
        bar.display = call.running and progress is not None and bool(progress[1])
        if progress is not None and progress[1]:
            bar.update(total=progress[1], progress=progress[0])
        self.query_one(".state", Static).update(self._state())
        reply = self.query_one(".reply", Static)
        reply.display = call.reply is not None
        if call.reply is not None:
            reply.update(self._reply(parts_of(call.reply)))

    def tick(self) -> None:
        """Time goes on."""
        if self.call.running:
            self.query_one(".state", Static).update(self._state())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A key is shown only where it does something."""
        if action == "cancel":
            return self.call.running
        return self.call.reply is not None if action == "fold" else True

    def action_fold(self) -> None:
        self._open = not self._open
        self.show()
        self.refresh_bindings()

    def action_view(self) -> None:
        self.post_message(self.Viewed(self.call))

    def action_cancel(self) -> None:
        self.call.cancel()

    def on_click(self) -> None:
        self.focus()

    def _asked(self) -> Text:
        told = arguments_line(self.call.arguments)
        if len(told) > ARGUMENT_CHARACTERS:
            told = f"{told[:ARGUMENT_CHARACTERS]} … ({len(told)} characters)"
        return Text.assemble((f"{self.call.number} ", "dim"), (clean(self.call.tool), "bold"), f" {told}")

    def _state(self) -> Text:
        call = self.call
        if call.running:
            _, total, message = call.progress or (0, None, None)
            so_far = f" {call.progress[0]:g}" if call.progress and not total else ""
            return Text(f"… {clean(message or 'running')}{so_far}, {call.seconds:.0f} s", "italic")
        if call.cancelled:
            return Text(f"✗ cancelled after {call.seconds:.1f} s", "bold")
        if call.trouble:
            return Text(f"✗ {clean(call.trouble)}", "bold")
        return Text(
            f"{'✗ failed' if call.failed else '✓'} {call.seconds:.1f} s", "bold" if call.failed else "dim"
        )

    def _reply(self, parts: tuple[Part, ...]) -> Text:
        told, left = Text(), OPEN_LINES if self._open else FOLD_LINES
        hidden = 0
        for part in parts:
            if part.head:
                told.append(f"[{part.head}]\n", "bold")
            text, more = folded(part.text, max(left, 0))
            left -= text.count("\n") + 1
            hidden += more
            told.append(f"{text}\n" if text else "")
        if hidden:
            way = "v shows all" if self._open else "enter unfolds"
            told.append(f"… {hidden} more lines: {way}", "italic")
        told.rstrip()
        return told


class Transcript(VerticalScroll, can_focus=False):
    """The calls of an attempt, the newest last and in sight."""

    def compose(self) -> ComposeResult:
        yield Static("Nothing was called yet.", id="nothing", markup=False)

    async def show(self, call: Call) -> None:
        """A call that is new, or has changed."""
        entry = next((each for each in self.query(Entry) if each.call is call), None)
        if entry is not None:
            entry.show()
        else:
            self.query_one("#nothing").display = False
            entry = Entry(call)
            await self.mount(entry)
        if call is self._newest() and (not call.running or call.progress is None):
            self.call_after_refresh(self.scroll_end, animate=False)
        self.screen.refresh_bindings()

    def focus_newest(self) -> None:
        if entries := list(self.query(Entry)):
            entries[-1].focus(scroll_visible=False)

    def tick(self) -> None:
        for entry in self.query(Entry):
            entry.tick()

    def _newest(self) -> Call | None:
        entries = list(self.query(Entry))
        return entries[-1].call if entries else None
