"""An attempt on the screen: its text beside its tools, and the transcript of what was called."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import ClassVar

import anyio
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.message import Message
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from decathlon_client import Tool
from decathlon_client.player.attempt import Attempt, Call, Phase, as_text
from decathlon_client.player.form_screen import FormScreen, Kept
from decathlon_client.player.page import Page
from decathlon_client.player.saying import clean, whole
from decathlon_client.player.text_screens import AskScreen, EditScreen, ViewScreen
from decathlon_client.player.transcript import Entry, Transcript
from decathlon_client.player.verdict_screen import VerdictScreen
from decathlon_client.values import CLAIM

ABOUT_LINES = 4
"""Of a tool's description, beside the list of tools; the form has the whole."""
CLAIM_SAID = (
    "This closes the attempt: no tool works any more, and what was done is graded. "
    "Your last words, if the task asks for an answer:"
)


class PlayScreen(Page[None]):
    """Where tools are called. A narrow terminal shows the desk or the transcript, a wide one both."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search", key_display="/"),
        Binding("t", "turn(True)", "Calls"),
        Binding("t", "turn(False)", "Task"),
        Binding("x", "cancel", "Cancel call"),
        Binding("c", "claim", "Claim"),
        Binding("r", "verdict", "Verdict"),
        Binding("escape", "back", "Tasks", key_display="esc"),
    ]

    class Changed(Message):
        """The attempt, or one of its calls, is not what it was."""

        def __init__(self, call: Call | None) -> None:
            super().__init__()
            self.call = call

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self.attempt = attempt
        self._shown: list[Tool] = []
        self._kept: dict[str, Kept] = {}
        self._ready = False

    def compose(self) -> ComposeResult:
        yield Static("", id="status", classes="bar")
        with Container(id="room"):
            with Container(id="desk"):
                with VerticalScroll(id="task", can_focus=True):
                    yield Static("", id="words")
                with Vertical(id="side"):
                    yield Input(placeholder="/ searches the tools", compact=True, id="filter")
                    yield OptionList(id="tools", compact=True, markup=False)
                    yield Static("", id="about")
            yield Transcript(id="transcript")
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.query_one("#tools").focus()
        self.set_interval(1.0, self._tick)
        self._show_phase()

    @property
    def asks_before_leaving(self) -> bool:
        """Whether something would be lost."""
        return self.attempt.phase is Phase.PLAYING and bool(self.attempt.calls)

    def ask_to_leave(self, leave: Callable[[], object]) -> None:
        """Leave, unless whoever plays would rather not."""

        def said(yes: bool | None) -> None:
            if yes:
                leave()

        if not isinstance(self.player.screen, AskScreen):
            self.player.push_screen(AskScreen("The attempt is not claimed yet. Close it?"), said)

    # What the attempt says

    async def on_play_screen_changed(self, event: Changed) -> None:
        if event.call is not None:
            await self.query_one(Transcript).show(event.call)
        self._show_phase()

    def _tick(self) -> None:
        self._show_status()
        self.query_one(Transcript).tick()

    def _show_phase(self) -> None:
        attempt = self.attempt
        if attempt.episode is not None and not self._ready:
            self._ready = True
            self._show_tools("")
        if not self._ready or attempt.trouble:
            self.query_one("#words", Static).update(self._waiting())
        elif attempt.episode is not None:
            self.query_one("#words", Static).update(Text(clean(attempt.episode.prompt).strip()))
        if attempt.phase in (Phase.SCORED, Phase.OVER) and not self.has_class("-over"):
            self.add_class("-over")
            if self._ready and (attempt.verdict is not None or attempt.unscored is not None):
                self.action_verdict()
        self._show_status()
        self.refresh_bindings()

    def _waiting(self) -> Text:
        attempt = self.attempt
        if attempt.trouble:
            said = Text.assemble(("The attempt is over\n\n", "bold red"), clean(attempt.trouble))
            return said.append("\n\nesc leads back to the tasks.", "dim")
        return Text.assemble(
            "Opening a sandbox and starting the task's servers …\n\n", (clean(attempt.note), "dim")
        )

    def _show_status(self) -> None:
        attempt = self.attempt
        running = len(attempt.running)
        told = [attempt.phase.value, f"{len(attempt.calls)} call{'s' * (len(attempt.calls) != 1)}"]
        if attempt.phase is Phase.GRADING and attempt.note:
            told.append(clean(attempt.note))
        if running:
            told.append(f"{running} running")
        told.append(as_text(anyio.current_time() - attempt.started))
        self.query_one("#status", Static).update(
            Text.assemble((attempt.task, "bold"), f"   {' · '.join(told)}", no_wrap=True, overflow="ellipsis")
        )

    # Tools

    @on(Input.Changed, "#filter")
    def _filtered(self, event: Input.Changed) -> None:
        self._show_tools(event.value)

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        self.query_one("#tools").focus()

    def _show_tools(self, words: str) -> None:
        episode = self.attempt.episode
        asked = words.casefold().split()
        tools = episode.tools if episode is not None else ()
        self._shown = [
            tool
            for tool in tools
            if all(word in f"{tool.name} {tool.description}".casefold() for word in asked)
        ]
        options = self.query_one("#tools", OptionList)
        options.clear_options()
        options.add_options(
            Option(Text(clean(tool.name), no_wrap=True, overflow="ellipsis")) for tool in self._shown
        )
        options.highlighted = 0 if self._shown else None

    @on(OptionList.OptionHighlighted, "#tools")
    def _marked(self, event: OptionList.OptionHighlighted) -> None:
        if event.option_index < len(self._shown):
            about = self.query_one("#about", Static)
            told = clean(self._shown[event.option_index].description)
            room = max(20, about.content_size.width) * ABOUT_LINES - 20
            about.update(Text(textwrap.shorten(told, room, placeholder=" …")))

    @on(OptionList.OptionSelected, "#tools")
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        tool = self._shown[event.option_index]
        if self.attempt.phase is not Phase.PLAYING:
            self.notify("The attempt is closed: no tool works any more.", severity="warning")
        elif tool.name.endswith(CLAIM):
            self.action_claim()
        else:
            self._fill_in(tool)

    @work
    async def _fill_in(self, tool: Tool) -> None:
        kept = self._kept.setdefault(tool.name, Kept())
        arguments = await self.player.push_screen_wait(FormScreen(tool, kept))
        if arguments is not None and self.attempt.phase is Phase.PLAYING:
            self.attempt.call(tool.name, arguments)
            self._turn(to_transcript=True)

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A key is shown only where it does something."""
        attempt = self.attempt
        match action:
            case "cancel":
                return bool(attempt.running)
            case "claim" | "search":
                return attempt.phase is Phase.PLAYING
            case "verdict":
                return attempt.verdict is not None or attempt.unscored is not None
            case "turn":
                return self._ready and parameters == (not self.has_class("-reading"),)
            case _:
                return True

    def action_search(self) -> None:
        self._turn(to_transcript=False)
        self.query_one("#filter").focus()

    def action_turn(self, to_transcript: bool) -> None:
        self._turn(to_transcript=to_transcript)

    def _turn(self, *, to_transcript: bool) -> None:
        self.set_class(to_transcript, "-reading")
        self.refresh_bindings()
        if to_transcript:
            self.call_after_refresh(self.query_one(Transcript).focus_newest)
        else:
            self.query_one("#tools").focus()

    def action_cancel(self) -> None:
        if running := self.attempt.running:
            running[-1].cancel()

    @work
    async def action_claim(self) -> None:
        answer = await self.player.push_screen_wait(
            EditScreen(f"{self.attempt.task}   claim that it is done", "", CLAIM_SAID, done="Claim")
        )
        if answer is not None:
            self.attempt.claim(answer.strip() or None)

    def action_verdict(self) -> None:
        if not isinstance(self.player.screen, VerdictScreen):
            self.player.push_screen(VerdictScreen(self.attempt))

    def action_back(self) -> None:
        search = self.query_one("#filter", Input)
        if search.has_focus:
            search.value = ""
            self.query_one("#tools").focus()
        elif self.asks_before_leaving:
            self.ask_to_leave(self._leave)
        else:
            self._leave()

    def _leave(self) -> None:
        self.attempt.leave()
        self.dismiss(None)

    @on(Entry.Viewed)
    def _viewed(self, event: Entry.Viewed) -> None:
        call = event.call
        self.player.push_screen(
            ViewScreen(
                f"{call.number} {clean(call.tool)}",
                whole(call.tool, call.arguments, call.reply, call.trouble),
            )
        )
