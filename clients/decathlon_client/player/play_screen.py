"""The play screen: task text, tool list and transcript of one attempt."""

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
from decathlon_client.player.form_screen import FormScreen, SavedForm
from decathlon_client.player.rendering import full_text, sanitize
from decathlon_client.player.screens import AskScreen, EditScreen, PlayerScreen, VerdictScreen, ViewScreen
from decathlon_client.player.session import Phase, PlaySession, ToolCall, format_duration
from decathlon_client.player.transcript import Entry, Transcript
from decathlon_client.values import CLAIM

DESCRIPTION_LINES = 4
"""Lines of a tool's description below the tool list; the form shows all of it."""
CLAIM_HINT = (
    "This ends the attempt: no tool can be called afterwards, and the work is graded as it is. "
    "If the task asks for an answer, write it here:"
)
LEAVING_QUESTIONS = {
    Phase.PLAYING: "The attempt is not claimed yet. Close it?",
    Phase.GRADING: "The attempt is being graded. Leave before its verdict is shown?",
}


class PlayScreen(PlayerScreen[None]):
    """Calls tools.

    A narrow terminal shows either the task and its tools or the transcript, a wide one both.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search", key_display="/"),
        Binding("t", "show_transcript(True)", "Calls"),
        Binding("t", "show_transcript(False)", "Task"),
        Binding("x", "cancel", "Cancel call"),
        Binding("c", "claim", "Claim"),
        Binding("r", "verdict", "Verdict"),
        Binding("escape", "back", "Tasks", key_display="esc"),
    ]

    class Changed(Message):
        """The session or one of its calls has changed."""

        def __init__(self, call: ToolCall | None) -> None:
            super().__init__()
            self.call = call

    def __init__(self, session: PlaySession) -> None:
        super().__init__()
        self.session = session
        self._shown: list[Tool] = []
        self._saved: dict[str, SavedForm] = {}
        self._ready = False

    def compose(self) -> ComposeResult:
        yield Static("", id="status", classes="bar")
        with Container(id="panes"):
            with Container(id="task-pane"):
                with VerticalScroll(id="task", can_focus=True):
                    yield Static("", id="words")
                with Vertical(id="side"):
                    yield Input(placeholder="/ search tools", compact=True, id="filter")
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
        """Whether an attempt runs, or its verdict is not known yet."""
        return self.session.phase in LEAVING_QUESTIONS

    def ask_to_leave(self, leave: Callable[[], object]) -> None:
        """Ask for confirmation, then call `leave`."""

        def on_answer(yes: bool | None) -> None:
            if yes:
                leave()

        if not isinstance(self.player_app.screen, AskScreen):
            self.player_app.push_screen(AskScreen(LEAVING_QUESTIONS[self.session.phase]), on_answer)

    # Changes of the session

    async def on_play_screen_changed(self, event: Changed) -> None:
        if event.call is not None:
            await self.query_one(Transcript).show(event.call)
        self._show_phase()

    def _tick(self) -> None:
        self._show_status()
        self.query_one(Transcript).tick()

    def _show_phase(self) -> None:
        session = self.session
        if session.episode is not None and not self._ready:
            self._ready = True
            self._show_tools("")
        if not self._ready or session.error:
            self.query_one("#words", Static).update(self._waiting())
        elif session.episode is not None:
            self.query_one("#words", Static).update(Text(sanitize(session.episode.prompt).strip()))
        if session.phase in (Phase.SCORED, Phase.OVER) and not self.has_class("-over"):
            self.add_class("-over")
            if self._ready and (session.verdict is not None or session.failed_verdict is not None):
                self.action_verdict()
        self._show_status()
        self.refresh_bindings()

    def _waiting(self) -> Text:
        session = self.session
        if session.error:
            content = Text.assemble(("The attempt is over\n\n", "bold red"), sanitize(session.error))
            return content.append("\n\nesc returns to the task list.", "dim")
        return Text.assemble(
            "Opening a sandbox and starting the task's servers …\n\n",
            (sanitize(session.status_message), "dim"),
        )

    def _show_status(self) -> None:
        session = self.session
        running = len(session.running)
        facts = [session.phase.value, f"{len(session.calls)} call{'s' * (len(session.calls) != 1)}"]
        if session.phase is Phase.GRADING and session.status_message:
            facts.append(sanitize(session.status_message))
        if running:
            facts.append(f"{running} running")
        facts.append(format_duration(anyio.current_time() - session.started))
        self.query_one("#status", Static).update(
            Text.assemble(
                (session.task, "bold"), f"   {' · '.join(facts)}", no_wrap=True, overflow="ellipsis"
            )
        )

    # Tools

    @on(Input.Changed, "#filter")
    def _filtered(self, event: Input.Changed) -> None:
        self._show_tools(event.value)

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        """Open the first tool that was found, which is the highlighted one."""
        tools = self.query_one("#tools", OptionList)
        tools.focus()
        tools.action_select()

    def _show_tools(self, words: str) -> None:
        episode = self.session.episode
        terms = words.casefold().split()
        tools = episode.tools if episode is not None else ()
        self._shown = [
            tool
            for tool in tools
            if all(word in f"{tool.name} {tool.description}".casefold() for word in terms)
        ]
        options = self.query_one("#tools", OptionList)
        options.clear_options()
        options.add_options(
            Option(Text(sanitize(tool.name), no_wrap=True, overflow="ellipsis")) for tool in self._shown
        )
        options.highlighted = 0 if self._shown else None

    @on(OptionList.OptionHighlighted, "#tools")
    def _highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if event.option_index < len(self._shown):
            about = self.query_one("#about", Static)
            description = sanitize(self._shown[event.option_index].description)
            room = max(20, about.content_size.width) * DESCRIPTION_LINES - 20
            about.update(Text(textwrap.shorten(description, room, placeholder=" …")))

    @on(OptionList.OptionSelected, "#tools")
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        tool = self._shown[event.option_index]
        if self.session.phase is not Phase.PLAYING:
            self.notify("The attempt is closed; tools can no longer be called.", severity="warning")
        elif tool.name.endswith(CLAIM):
            self.action_claim()
        else:
            self._fill_in(tool)

    @work
    async def _fill_in(self, tool: Tool) -> None:
        saved = self._saved.setdefault(tool.name, SavedForm())
        arguments = await self.player_app.push_screen_wait(FormScreen(tool, saved))
        if arguments is not None and self.session.phase is Phase.PLAYING:
            self.session.call(tool.name, arguments)
            self._switch_pane(to_transcript=True)

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Show a key only when it has an effect."""
        session = self.session
        match action:
            case "cancel":
                return bool(session.running)
            case "claim" | "search":
                return session.phase is Phase.PLAYING
            case "verdict":
                return session.verdict is not None or session.failed_verdict is not None
            case "show_transcript":
                return self._ready and parameters == (not self.has_class("-reading"),)
            case _:
                return True

    def action_search(self) -> None:
        self._switch_pane(to_transcript=False)
        self.query_one("#filter").focus()

    def action_show_transcript(self, show: bool) -> None:
        self._switch_pane(to_transcript=show)

    def _switch_pane(self, *, to_transcript: bool) -> None:
        self.set_class(to_transcript, "-reading")
        self.refresh_bindings()
        if to_transcript:
            self.call_after_refresh(self.query_one(Transcript).focus_newest)
        else:
            self.query_one("#tools").focus()

    def action_cancel(self) -> None:
        if running := self.session.running:
            running[-1].cancel()

    @work
    async def action_claim(self) -> None:
        answer = await self.player_app.push_screen_wait(
            EditScreen(f"{self.session.task}   claim done", "", CLAIM_HINT, done="Claim")
        )
        if answer is not None:
            self.session.claim(answer.strip() or None)

    def action_verdict(self) -> None:
        if not isinstance(self.player_app.screen, VerdictScreen):
            self.player_app.push_screen(VerdictScreen(self.session))

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
        self.session.leave()
        self.dismiss(None)

    @on(Entry.Viewed)
    def _viewed(self, event: Entry.Viewed) -> None:
        call = event.call
        self.player_app.push_screen(
            ViewScreen(
                f"{call.number} {sanitize(call.tool)}",
                full_text(call.tool, call.arguments, call.reply, call.error),
            )
        )
