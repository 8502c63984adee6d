"""Reports of a batch: its progress on stderr, the result of each episode, and their summary by task."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TextIO, TypeAlias, TypeVar

from decathlon_client.client_values import Verdict

LINE_SECONDS = 10.0
"""Interval of the lines where there is no terminal."""
PACE_EPISODES = 100
"""The pace is measured over the last episodes, so that it follows a change of the model or the machine."""
T = TypeVar("T")


@dataclass(slots=True)
class Tally:
    """Counts of a batch's episodes by their state, and its pace."""

    total: int | None = None
    """None if the tasks have no length."""
    opening: int = 0
    playing: int = 0
    grading: int = 0
    scored: int = 0
    """Episodes with a reward."""
    lost: int = 0
    """Episodes without a reward because of the infrastructure."""
    broken: int = 0
    """Episodes without a reward because of the player."""
    dropped: int = 0
    """Episodes without a reward because of the deadline of their group."""
    rewards: float = 0.0
    per_minute: float | None = None
    """How many of the last episodes ended per minute; None as long as nobody knows."""
    seconds_left: float | None = None
    """Rest of the batch at this pace; None as long as nobody knows."""
    away_seconds: float | None = None
    """How long the server has not been reached; None while it answers."""

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
        # The start of the batch, or the end before the first that counts.
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


Fault: TypeAlias = Literal["infrastructure", "player", "deadline"]
"""Why there is no verdict: by whose fault, or because the attempt was dropped at its group's deadline."""


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """The result of one episode: a verdict, or a failure and whose fault it is."""

    index: int
    """Counts the episodes from 0 in the order in which they were drawn."""
    task: str
    group: int
    """Counts the tasks from 0."""
    attempt: int
    """Counts the episodes of one task from 0; always 0 without `n`."""
    episode: str | None
    """Public id, as in verdicts and for `decathlon-mcp show`; None if the server never made an episode."""
    played: T | None
    """The player's return value; None if the player did not return."""
    verdict: Verdict | None
    failure: Exception | None = field(compare=False)
    """If the player raised, a PlayerFailedError with this error as its `__cause__`, and its `traceback`."""
    fault: Fault | None
    seconds: float
    """From the first try to open the episode to its end."""
    lost: tuple[str, ...] = ()
    """Episodes that ended with their node of a cluster, after which the attempt was played again."""
    page: str | None = None
    """Address for people; None without an episode or page (an embedded server, `serve --no-page`)."""
    resumed: bool = False
    """Whether it was played before, and is read from the file of `resume`."""

    @property
    def reward(self) -> float | None:
        """The verdict's reward; None, never zero, if there is no verdict."""
        return None if self.verdict is None else self.verdict.reward


def pass_at(k: int, attempts: int, successes: int) -> float:
    """The probability that at least one of `k` attempts succeeds.

    The unbiased estimate `1 - C(n-c, k) / C(n, k)` from `c` successes in `n` attempts. Raises ValueError
    unless `k` is from 1 to `attempts`.
    """
    return 1 - math.comb(attempts - successes, k) / _choices(k, attempts)


def pass_all(k: int, attempts: int, successes: int) -> float:
    """The probability that all of `k` attempts succeed: `C(c, k) / C(n, k)`. Raises as `pass_at`."""
    return math.comb(successes, k) / _choices(k, attempts)


def _choices(k: int, attempts: int) -> int:
    if not 1 <= k <= attempts:
        raise ValueError(f"k must be from 1 to {attempts}, not {k}")
    return math.comb(attempts, k)


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """The episodes of one task that have ended.

    `scored` of the `episodes` have a reward, and the others are `lost`; `successes` succeeded. `mean` and
    `spread` (the sample's standard deviation) describe the rewards; None if there are too few. A lost episode
    counts in neither, and in pass@k and pass^k as an episode without success: what is lost does not make a
    model better.
    """

    task: str
    episodes: int
    scored: int
    successes: int
    mean: float | None
    spread: float | None

    @property
    def lost(self) -> int:
        """The number of episodes without a reward."""
        return self.episodes - self.scored

    def pass_at(self, k: int) -> float | None:
        """The probability that at least one of `k` attempts succeeds; None with fewer than `k` episodes.

        Raises ValueError for a `k` below 1.
        """
        return None if self.episodes < k else pass_at(k, self.episodes, self.successes)

    def pass_all(self, k: int) -> float | None:
        """The probability that all of `k` attempts succeed, also written pass^k.

        None and ValueError as for `pass_at`.
        """
        return None if self.episodes < k else pass_all(k, self.episodes, self.successes)


@dataclass(frozen=True, slots=True)
class Summary:
    """The `tasks` of a batch, in the order in which their first episodes ended. `print(summary)` is a table.

    In the sums over tasks each task counts the same, however many episodes it has.
    """

    tasks: tuple[TaskSummary, ...]

    @classmethod
    def of(cls, results: Iterable[Result[Any]], *, with_branches: bool = False) -> Summary:
        """Summarize results, for example the results of several batches.

        `with_branches`: include episodes that branch from others, which are no attempts of their own.
        """
        counts = SummaryCounts(with_branches=with_branches)
        for result in results:
            counts.add(result.task, result.verdict)
        return counts.summary()

    @property
    def mean(self) -> float | None:
        """The mean of the tasks' means; None without a reward."""
        return _mean(task.mean for task in self.tasks)

    @property
    def spread(self) -> float | None:
        """The standard deviation of the tasks' means; None below two tasks with a reward."""
        return _spread(task.mean for task in self.tasks)

    def pass_at(self, k: int) -> float | None:
        """The mean of pass@k over tasks with at least `k` episodes; None if there are none."""
        return _mean(task.pass_at(k) for task in self.tasks)

    def pass_all(self, k: int) -> float | None:
        """The mean of the tasks' pass^k, over the same tasks as `pass_at`."""
        return _mean(task.pass_all(k) for task in self.tasks)

    def __str__(self) -> str:
        most = max((task.episodes for task in self.tasks), default=0)
        ks = [2**power for power in range(most.bit_length())]
        head = ["task", "episodes", "lost", "mean", "spread", *(f"pass@{k}" for k in ks)]
        rows = [
            [task.task, str(task.episodes), str(task.lost), *_cells(task, ks)]
            for task in sorted(self.tasks, key=lambda task: task.task)
        ]
        name = f"{len(self.tasks)} task{'' if len(self.tasks) == 1 else 's'}"
        counts = (sum(task.episodes for task in self.tasks), sum(task.lost for task in self.tasks))
        rows.append([name, *map(str, counts), *_cells(self, ks)])
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        return "\n".join(_line(row, widths) for row in (head, *rows))


class SummaryCounts:
    """Counts results as they arrive."""

    def __init__(self, *, with_branches: bool = False) -> None:
        self._outcomes: dict[str, list[tuple[float, bool] | None]] = {}
        """The reward and the success of each result by task; None without a verdict."""
        self._with_branches = with_branches

    def add(self, task: str, verdict: Verdict | None) -> None:
        """Count a result. A branch's result does not count, unless `with_branches`."""
        if verdict is None or "branch" not in verdict.raw or self._with_branches:
            outcome = None if verdict is None else (verdict.reward, verdict.success)
            self._outcomes.setdefault(task, []).append(outcome)

    def summary(self) -> Summary:
        # Copied first: the synchronous client reads it in another thread than the batch's.
        return Summary(
            tuple(_task_summary(task, list(outcomes)) for task, outcomes in list(self._outcomes.items()))
        )


def _task_summary(task: str, outcomes: list[tuple[float, bool] | None]) -> TaskSummary:
    scored = [outcome for outcome in outcomes if outcome is not None]
    rewards = [reward for reward, _ in scored]
    return TaskSummary(
        task=task,
        episodes=len(outcomes),
        scored=len(scored),
        successes=sum(success for _, success in scored),
        mean=_mean(rewards),
        spread=_spread(rewards),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def _spread(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    if len(present) < 2:
        return None
    # A server can send any number, and `stdev` fails for these (Python 3.11).
    return statistics.stdev(present) if all(map(math.isfinite, present)) else math.nan


def _cells(row: TaskSummary | Summary, ks: Iterable[int]) -> list[str]:
    values = [row.mean, row.spread, *(row.pass_at(k) for k in ks)]
    return ["-" if value is None else f"{value:.3f}" for value in values]


def _line(row: list[str], widths: list[int]) -> str:
    name, *numbers = (
        cell.rjust(width) if column else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([name, *numbers]).rstrip()
