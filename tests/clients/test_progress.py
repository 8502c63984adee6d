"""Showing the progress of a batch, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys

import pytest
from decathlon_client import Tally
from decathlon_client.batch_results import LineDisplay, Pace, progress_display


def test_lines_are_written_rarely_and_at_the_end() -> None:
    out = io.StringIO()
    display = LineDisplay(out, interval_seconds=3600)
    tally = Tally(total=2, playing=1)
    display.show(tally)
    tally.scored, tally.lost, tally.playing, tally.rewards = 1, 1, 0, 0.5
    display.show(tally)
    display.show(tally)
    assert out.getvalue() == "2 of 2 episodes: reward 0.500, 0 opening, 0 playing, 0 grading, 1 lost\n"


def test_the_rate_is_that_of_the_last_episodes_and_gives_the_time_left() -> None:
    now = 0.0
    pace = Pace(clock=lambda: now)
    tally = Tally(total=1000, playing=4)
    pace.update(tally)
    assert (tally.per_minute, tally.seconds_left) == (None, None)
    for seconds in [60.0] * 100 + [6.0] * 100:
        now += seconds
        tally.scored += 1
        pace.note_end()
    pace.update(tally)
    assert (tally.per_minute, tally.seconds_left) == (10.0, 4800.0)
    assert str(tally).endswith("10 per minute, 80 min left")
    now += 600.0  # no episode ends: the rate falls, and the time left grows
    pace.update(tally)
    assert (tally.per_minute, tally.seconds_left) == (5.0, 9600.0)
    assert str(tally).endswith("5 per minute, 2 h 40 min left")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_terminal_shows_a_bar_if_rich_is_installed(has_rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    with progress_display(True) as show:
        assert show is not None
        show(Tally(total=1, scored=1, rewards=1.0))
    assert ("\x1b[" in out.getvalue()) is has_rich
    assert "reward 1.000" in out.getvalue()
