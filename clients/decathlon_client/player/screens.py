"""Simple screens: read a text, edit a text, confirm, show the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, cast

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Static, TextArea

from decathlon_client.player.rendering import sanitize
from decathlon_client.player.session import PlaySession

Result = TypeVar("Result")


class PlayerScreen(Screen[Result]):
    """Base of the player's screens."""

    @property
    def player_app(self) -> App[None]:
        """The application. Textual types `app` as an application of unknown result."""
        return cast("App[None]", self.app)


class ViewScreen(PlayerScreen[None]):
    """Shows a long text for reading and copying."""

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


class EditScreen(PlayerScreen[str | None]):
    """Edits a text; the result is None if the user goes back."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "done", "Done", priority=True),
        Binding("escape", "back", "Back", key_display="esc", priority=True),
    ]

    def __init__(self, title: str, text: str, hint: str = "", *, done: str = "Done") -> None:
        super().__init__()
        self._title = title
        self._text = text
        self._hint = hint
        self._bindings.key_to_bindings["ctrl+r"] = [Binding("ctrl+r", "done", done, priority=True)]

    def compose(self) -> ComposeResult:
        yield Static(self._title, classes="bar", markup=False)
        if self._hint:
            yield Static(self._hint, classes="hint", markup=False)
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
    """A yes/no question. Ctrl-C means yes, so that pressing it twice leaves the player."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,enter", "answer(True)", "Yes", key_display="y"),
        Binding("n,escape", "answer(False)", "No", key_display="n"),
        Binding("ctrl+c,ctrl+q", "answer(True)", show=False, priority=True),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(id="question"):
            yield Static(self._question, markup=False)
            yield Static("y  yes      n  no", classes="dim", markup=False)

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class VerdictScreen(PlayerScreen[None]):
    """The result of an attempt: reward, metrics, evaluator output; or why there is no verdict."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,r", "back", "Back to the transcript", key_display="esc"),
        Binding("n", "next", "Next task"),
    ]

    def __init__(self, session: PlaySession) -> None:
        super().__init__()
        self._session = session

    def compose(self) -> ComposeResult:
        yield Static(f"{self._session.task}   the verdict", classes="bar", markup=False)
        with VerticalScroll(id="verdict"):
            yield Static(self._content())
        yield Footer(show_command_palette=False, compact=True)

    def action_back(self) -> None:
        self.dismiss(None)

    def action_next(self) -> None:
        self._session.leave()
        self.player_app.pop_screen()
        self.player_app.pop_screen()

    def _content(self) -> Text:
        verdict = self._session.verdict
        if verdict is None:
            return _no_verdict_text(self._session)
        raw = verdict.raw
        passed, colour = ("PASSED", "green") if verdict.success else ("NOT PASSED", "red")
        if verdict.status == "forfeited":
            passed = "FORFEITED"
        content = Text.assemble(
            (f" {passed} ", f"bold reverse {colour}"), "   reward ", (f"{verdict.reward:g}", "bold")
        )
        content.append("\n\n")
        content.append_text(_metrics(verdict.metrics, raw.get("weights") or {}))
        if not raw.get("claimed", True):
            content.append("\nThe attempt was not claimed.\n")
        for name in ("detail", "uncaught"):
            if text := str(raw.get(name) or "").strip():
                content.append(f"\n{sanitize(text)}\n")
        if output := str(raw.get("evaluator_output") or "").strip():
            content.append("\nEvaluator output\n", "bold")
            content.append(sanitize(output) + "\n")
        content.append(f"\nepisode {raw.get('episode', '')}", "dim")
        return content


def _metrics(metrics: Mapping[str, float], weights: Mapping[str, Any]) -> Text:
    """One line per metric; weighted metrics also show their contribution."""
    content = Text()
    longest = max((len(name) for name in metrics), default=0)
    for name, value in metrics.items():
        content.append(f"{sanitize(name):<{longest}}  {value:>10.4g}")
        if name in weights:
            content.append(f"  × {weights[name]:g} = {value * weights[name]:.4g}", "bold")
        content.append("\n")
    return content


def _no_verdict_text(session: PlaySession) -> Text:
    """Text for an attempt without a verdict (which is not a reward of zero)."""
    raw = session.failed_verdict or {}
    content = Text.assemble((" NO VERDICT ", "bold reverse yellow"), f"   {raw.get('status', '')}\n\n")
    content.append(sanitize(session.error) + "\n")
    if output := str(raw.get("evaluator_output") or "").strip():
        content.append("\nEvaluator output\n", "bold")
        content.append(sanitize(output) + "\n")
    content.append("\nGrading failed. This says nothing about the attempt itself.", "dim")
    return content
