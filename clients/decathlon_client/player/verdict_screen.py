"""The verdict: passed or not, the reward and what it is made of, the evaluator's own words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from decathlon_client.player.attempt import Attempt
from decathlon_client.player.page import Page
from decathlon_client.player.saying import clean


class VerdictScreen(Page[None]):
    """Of an attempt that was graded, or could not be."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,r", "back", "Back to the transcript", key_display="esc"),
        Binding("n", "next", "Next task"),
    ]

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self._attempt = attempt

    def compose(self) -> ComposeResult:
        yield Static(f"{self._attempt.task}   the verdict", classes="bar", markup=False)
        with VerticalScroll(id="verdict"):
            yield Static(self._told())
        yield Footer(show_command_palette=False, compact=True)

    def action_back(self) -> None:
        self.dismiss(None)

    def action_next(self) -> None:
        self._attempt.leave()
        self.player.pop_screen()
        self.player.pop_screen()

    def _told(self) -> Text:
        verdict = self._attempt.verdict
        if verdict is None:
            return _none(self._attempt)
        raw = verdict.raw
        passed, colour = ("PASSED", "green") if verdict.success else ("NOT PASSED", "red")
        told = Text.assemble(
            (f" {passed} ", f"bold reverse {colour}"), "   reward ", (f"{verdict.reward:g}", "bold")
        )
        told.append("\n\n")
        told.append_text(_metrics(verdict.metrics, raw.get("weights") or {}))
        if not raw.get("claimed", True):
            told.append("\nThe attempt was not claimed.\n")
        if output := str(raw.get("evaluator_output") or "").strip():
            told.append("\nThe evaluator said\n", "bold")
            told.append(clean(output) + "\n")
        told.append(f"\nepisode {raw.get('episode', '')}", "dim")
        return told


def _metrics(metrics: Mapping[str, float], weights: Mapping[str, Any]) -> Text:
    """A line each; those that have a weight say what they add."""
    told = Text()
    longest = max((len(name) for name in metrics), default=0)
    for name, value in metrics.items():
        told.append(f"{clean(name):<{longest}}  {value:>10.4g}")
        if name in weights:
            told.append(f"  × {weights[name]:g} = {value * weights[name]:.4g}", "bold")
        told.append("\n")
    return told


def _none(attempt: Attempt) -> Text:
    """There is no verdict, which is not a reward of zero."""
    raw = attempt.unscored or {}
    told = Text.assemble((" NO VERDICT ", "bold reverse yellow"), f"   {raw.get('status', '')}\n\n")
    told.append(clean(attempt.trouble) + "\n")
    if output := str(raw.get("evaluator_output") or "").strip():
        told.append("\nThe evaluator said\n", "bold")
        told.append(clean(output) + "\n")
    told.append("\nThe grading failed; that says nothing about the attempt.", "dim")
    return told
