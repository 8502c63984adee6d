"""The progress of a batch: its counts, its pace, and showing them on stderr."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO, TypeAlias

LINE_SECONDS = 10.0
"""Interval of the lines where there is no terminal."""
PACE_EPISODES = 100
"""The pace is that of the last episodes, so that it follows a change of the model or the machine."""


@dataclass(slots=True)
class Tally:
    """Counts of a batch's episodes by their state, and its pace.

    `total` is None if the tasks have no length. `scored` episodes have a reward; `lost` and `broken` ones
    have none, because of the infrastructure or of the player, and `dropped` ones because of the deadline of
    their group. `rewards` is the sum of all rewards.
    `per_minute` is how many of the last episodes ended per minute, `seconds_left` the rest of the batch at
    this pace; None as long as nobody knows. `away_seconds` is how long the server has not been reached;
    None while it answers.
    """

    total: int | None = None
    opening: int = 0
    playing: int = 0
    grading: int = 0
    scored: int = 0
    lost: int = 0
    broken: int = 0
    dropped: int = 0
    rewards: float = 0.0
    per_minute: float | None = None
    seconds_left: float | None = None
    away_seconds: float | None = None

    @property
    def done(self) -> int:
        """Episodes that have ended, with or without a reward."""
        return self.scored + self.lost + self.broken + self.dropped

    @property
    def mean_reward(self) -> float | None:
        """The mean over the scored episodes; None if there are none."""
        return self.rewards / self.scored if self.scored else None

    def __str__(self) -> str:
        mean = "-" if self.mean_reward is None else f"{self.mean_reward:.3f}"
        parts = [f"reward {mean}"]
        parts += [f"{self.opening} opening", f"{self.playing} playing", f"{self.grading} grading"]
        parts += [f"{self.lost} lost"] if self.lost else []
        parts += [f"{self.broken} broken"] if self.broken else []
        parts += [f"{self.dropped} dropped"] if self.dropped else []
        if self.away_seconds is not None:
            return ", ".join([*parts, f"waiting for the server for {_duration(self.away_seconds)}"])
        if self.per_minute is not None:
            parts.append(f"{self.per_minute:.3g} per minute")
        if self.seconds_left:
            parts.append(f"{_duration(self.seconds_left)} left")
        return ", ".join(parts)


class Pace:
    """How fast episodes end, over the last `PACE_EPISODES` of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The start of the batch, or the end before the first one that counts.
        self._times = deque([clock()], maxlen=PACE_EPISODES + 1)

    def note_end(self) -> None:
        self._times.append(self._clock())

    def update(self, tally: Tally) -> None:
        """Set the tally's pace as of now."""
        ended, seconds = len(self._times) - 1, self._clock() - self._times[0]
        if not ended or seconds <= 0:
            return
        tally.per_minute = 60 * ended / seconds
        if tally.total is not None:
            tally.seconds_left = max(tally.total - tally.done, 0) * seconds / ended


def _duration(seconds: float) -> str:
    """A duration for people, rounded to two units."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


ShowTally: TypeAlias = Callable[[Tally], None]
"""Called after every change of the tally, and every second."""


@contextmanager
def progress_display(enabled: bool) -> Generator[ShowTally | None]:
    """Show a tally on stderr: a bar on a terminal if `rich` is installed, otherwise a line now and then.

    None if it is not enabled.
    """
    if not enabled:
        yield None
        return
    if sys.stderr.isatty():
        try:
            import rich  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ImportError:
            pass
        else:
            with _bar() as show:
                yield show
            return
    yield LineDisplay(sys.stderr).show


class LineDisplay:
    """Writes one line every `interval_seconds`, and one at the end."""

    def __init__(self, stream: TextIO, interval_seconds: float = LINE_SECONDS) -> None:
        self._stream = stream
        self._interval_seconds = interval_seconds
        self._last = time.monotonic()
        self._is_complete = False

    def show(self, tally: Tally) -> None:
        now = time.monotonic()
        if self._is_complete or (tally.done != tally.total and now - self._last < self._interval_seconds):
            return
        self._last, self._is_complete = now, tally.done == tally.total
        total = "" if tally.total is None else f" of {tally.total}"
        self._stream.write(f"{tally.done}{total} episodes: {tally}\n")
        self._stream.flush()


@contextmanager
def _bar() -> Generator[ShowTally]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        row = bar.add_task("", total=None)

        def show(tally: Tally) -> None:
            bar.update(row, completed=tally.done, total=tally.total, description=str(tally))

        yield show
