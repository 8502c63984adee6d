"""The progress of a batch: its counts, and showing them on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO, TypeAlias

LINE_SECONDS = 10.0


@dataclass(slots=True)
class Tally:
    """Counts of a batch's episodes by their state.

    `total` is None if the tasks have no length. `scored` episodes have a reward; `lost` and `broken` ones
    have none, because of the infrastructure or of the player. `rewards` is the sum of all rewards.
    """

    total: int | None = None
    opening: int = 0
    playing: int = 0
    grading: int = 0
    scored: int = 0
    lost: int = 0
    broken: int = 0
    rewards: float = 0.0

    @property
    def done(self) -> int:
        """Episodes that have ended, with or without a reward."""
        return self.scored + self.lost + self.broken

    @property
    def mean_reward(self) -> float | None:
        """The mean over the scored episodes; None if there are none."""
        return self.rewards / self.scored if self.scored else None

    def __str__(self) -> str:
        mean = "-" if self.mean_reward is None else f"{self.mean_reward:.3f}"
        text = f"reward {mean}, {self.opening} opening, {self.playing} playing, {self.grading} grading"
        text += f", {self.lost} lost" if self.lost else ""
        return text + (f", {self.broken} broken" if self.broken else "")


ShowTally: TypeAlias = Callable[[Tally], None]
"""Called after every change of the tally."""


@contextmanager
def progress_display(enabled: bool) -> Generator[ShowTally]:
    """Show a tally on stderr: a bar on a terminal if `rich` is installed, otherwise a line now and then."""
    if not enabled:
        yield lambda tally: None
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

    def show(self, tally: Tally) -> None:
        now = time.monotonic()
        if tally.done != tally.total and now - self._last < self._interval_seconds:
            return
        self._last = now
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
