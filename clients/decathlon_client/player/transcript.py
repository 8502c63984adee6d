"""The transcript: each call with its reply; long replies are folded."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.widgets import ProgressBar, Static

from decathlon_client.player.rendering import (
    FOLDED_LINES,
    OPEN_LINES,
    ReplyPart,
    arguments_line,
    fold,
    reply_parts,
    sanitize,
)
from decathlon_client.player.session import ToolCall

ARGUMENT_CHARACTERS = 400


class Entry(Vertical, can_focus=True):
    """One call: tool and arguments, state, reply."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,space", "fold", "Unfold", key_display="⏎"),
        Binding("v", "view", "View"),
        Binding("x", "cancel", "Cancel"),
    ]

    class Viewed(Message):
        """The user wants to see the full call."""

        def __init__(self, call: ToolCall) -> None:
            super().__init__()
            self.call = call

    def __init__(self, call: ToolCall) -> None:
        super().__init__(classes="entry")
        self.call = call
        self._open = False

    def compose(self) -> ComposeResult:
        yield Static(self._asked(), classes="call-line")
        yield ProgressBar(show_eta=False, classes="progress")
        yield Static("", classes="state")
        yield Static("", classes="reply")

    def on_mount(self) -> None:
        self.show()

    def show(self) -> None:
        """Show the current state of the call."""
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
            reply.update(self._reply(reply_parts(call.reply)))

    def tick(self) -> None:
        """Update the elapsed time."""
        if self.call.running:
            self.query_one(".state", Static).update(self._state())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Show a key only when it has an effect."""
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
        arguments = arguments_line(self.call.arguments)
        if len(arguments) > ARGUMENT_CHARACTERS:
            arguments = f"{arguments[:ARGUMENT_CHARACTERS]} … ({len(arguments)} characters)"
        return Text.assemble(
            (f"{self.call.number} ", "dim"), (sanitize(self.call.tool), "bold"), f" {arguments}"
        )

    def _state(self) -> Text:
        call = self.call
        if call.running:
            _, total, message = call.progress or (0, None, None)
            so_far = f" {call.progress[0]:g}" if call.progress and not total else ""
            return Text(f"… {sanitize(message or 'running')}{so_far}, {call.seconds:.0f} s", "italic")
        if call.cancelled:
            return Text(f"✗ cancelled after {call.seconds:.1f} s", "bold")
        if call.error:
            return Text(f"✗ {sanitize(call.error)}", "bold")
        return Text(
            f"{'✗ failed' if call.failed else '✓'} {call.seconds:.1f} s", "bold" if call.failed else "dim"
        )

    def _reply(self, parts: tuple[ReplyPart, ...]) -> Text:
        content, remaining = Text(), OPEN_LINES if self._open else FOLDED_LINES
        hidden = 0
        for part in parts:
            if part.head:
                content.append(f"[{part.head}]\n", "bold")
            text, more = fold(part.text, max(remaining, 0))
            remaining -= text.count("\n") + 1
            hidden += more
            content.append(f"{text}\n" if text else "")
        if hidden:
            hint = "v shows all" if self._open else "enter unfolds"
            content.append(f"… {hidden} more lines: {hint}", "italic")
        content.rstrip()
        return content


class Transcript(VerticalScroll, can_focus=False):
    """All calls of an attempt, newest last, scrolled into view."""

    def compose(self) -> ComposeResult:
        yield Static("No calls yet.", id="nothing", markup=False)

    async def show(self, call: ToolCall) -> None:
        """Add a call, or update its entry."""
        entry = next((entry for entry in self.query(Entry) if entry.call is call), None)
        if entry is not None:
            entry.show()
        else:
            self.query_one("#nothing").display = False
            entry = Entry(call)
            await self.mount(entry)
            # The screen turned to the transcript for this call, possibly before its entry was here.
            if self.screen.has_class("-reading"):
                self.focus_newest()
        if call is self._newest() and (not call.running or call.progress is None):
            self.call_after_refresh(self.scroll_end, animate=False)
        self.screen.refresh_bindings()

    def focus_newest(self) -> None:
        if entries := list(self.query(Entry)):
            entries[-1].focus(scroll_visible=False)

    def tick(self) -> None:
        for entry in self.query(Entry):
            entry.tick()

    def _newest(self) -> ToolCall | None:
        entries = list(self.query(Entry))
        return entries[-1].call if entries else None
