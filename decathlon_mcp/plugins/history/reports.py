"""The numbers of runs: sums that SQL makes of the rows of episodes, and the reports that are made of them.

A run that is in several folders is one run, so that sums of each folder are joined here.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from decathlon_client.batch_results import pass_all, pass_at

from decathlon_mcp.plugins.history.columns import Outcome
from decathlon_mcp.plugins.history.queries import CLOSED, marks, owned, reason
from decathlon_mcp.plugins.history.values import (
    Counts,
    CurvePoint,
    PassAtK,
    RunComparison,
    RunReport,
    RunSummary,
    Sums,
    TaskComparison,
    TaskReport,
    powers_of_two,
)

CURVE_POINTS = 50
"""Points of a curve over time; one over steps has a point for each step, at most MAX_STEPS."""
MAX_STEPS = 2_000
LOST, _, LIVE, SUCCEEDED = map(int, Outcome)
_COUNTED = "FROM episodes WHERE run IS NOT NULL AND NOT is_derived"
_SUMS = (
    f"count(*), total(outcome = {LIVE}), total(outcome = {SUCCEEDED}), total(NOT pinned), count(reward),"
    " total(reward), total(reward * reward), count(calls), total(calls), count(turns), total(turns),"
    " min(started_at), min(reward), max(started_at), max(reward)"
)
_Key = TypeVar("_Key")


class TaskKey(NamedTuple):
    """A task of a suite, as rows name them."""

    suite: str
    task: str


class AttemptSums(NamedTuple):
    """Attempts at a task, of a run, or of a point of a curve: the columns of `_SUMS`."""

    attempts: int
    live: int
    successes: int
    unpinned: int
    scored: int
    rewards: float
    squares: float
    """Of the rewards."""
    with_calls: int
    calls: float
    with_turns: int
    turns: float
    started_at: float
    lowest: float | None
    newest_at: float
    highest: float | None

    @classmethod
    def joined(cls, parts: Iterable[AttemptSums]) -> AttemptSums:
        columns = [[value for value in column if value is not None] for column in zip(*parts, strict=True)]
        least, greatest = partial[Any](min, default=None), partial[Any](max, default=None)
        ways: list[Callable[[list[Any]], Any]] = [*[sum] * 11, least, least, greatest, greatest]
        return cls(*(join(column) for join, column in zip(ways, columns, strict=True)))

    @property
    def counts(self) -> Counts:
        return Counts(
            live=int(self.live),
            finished=int(self.attempts - self.live),
            scored=self.scored,
            successes=int(self.successes),
        )

    @property
    def reward(self) -> Sums:
        return Sums(self.scored, self.rewards, self.squares)

    @property
    def success(self) -> Sums:
        return Sums.of_shares(self.counts.successes, self.counts.finished)


TaskSums: TypeAlias = Mapping[TaskKey, AttemptSums]
"""One run."""


def joined(sums: Iterable[tuple[_Key, AttemptSums]]) -> dict[_Key, AttemptSums]:
    """The sums by their keys."""
    parts: dict[_Key, list[AttemptSums]] = {}
    for key, part in sums:
        parts.setdefault(key, []).append(part)
    return {key: some[0] if len(some) == 1 else AttemptSums.joined(some) for key, some in parts.items()}


def run_times(connection: sqlite3.Connection, owner: str | None) -> Iterator[tuple[str, float]]:
    """The runs, each with the start of its newest episode."""
    where, values = owned(owner)
    yield from connection.execute(f"SELECT run, max(started_at) {_COUNTED}{where} GROUP BY run", values)


def task_sums(
    connection: sqlite3.Connection, runs: Sequence[str] | None, owner: str | None
) -> Iterator[tuple[tuple[str, TaskKey], AttemptSums]]:
    """The sums of each task of these runs; of all runs, if `runs` is None."""
    where, values = owned(owner)
    among = "" if runs is None else f" AND run IN ({marks(runs)})"
    for run, suite, task, *sums in connection.execute(
        f"SELECT run, suite, task, {_SUMS} {_COUNTED}{among}{where} GROUP BY run, suite, task",
        (*(runs or ()), *values),
    ):
        yield (run, TaskKey(suite, task)), AttemptSums(*sums)


def lost_reasons(connection: sqlite3.Connection, run: str, owner: str | None) -> Iterator[tuple[str, int]]:
    """Why episodes of a run were lost, and how many for each reason. A client's own words are one of them."""
    where, values = owned(owner)
    lost = f"{_COUNTED} AND run = ? AND +outcome = {LOST}{where}"
    for ending, status, count in connection.execute(
        f"SELECT ending, status, count(*) {lost} AND ending IS NOT ? GROUP BY ending, status",
        (run, *values, CLOSED),
    ):
        yield reason(ending, status, None), count
    # Not by GROUP BY: the index for numbers has no causes.
    words = connection.execute(f"SELECT cause {lost} AND ending = ?", (run, *values, CLOSED))
    yield from Counter(reason(CLOSED, None, cause) for (cause,) in words).items()


def has_steps(connection: sqlite3.Connection, run: str, owner: str | None) -> bool:
    where, values = owned(owner)
    statement = f"SELECT EXISTS (SELECT 1 {_COUNTED} AND run = ?{where} AND step IS NOT NULL)"
    return bool(connection.execute(statement, (run, *values)).fetchone()[0])


def curve(
    connection: sqlite3.Connection, run: str, owner: str | None, bins: tuple[float, float] | None
) -> Iterator[tuple[float, AttemptSums]]:
    """Finished attempts by step; or by time, if `bins` has the first bin's start and a bin's width."""
    where, values = owned(owner)
    first, width = bins or (0.0, 1.0)
    at = "step" if bins is None else "? + ? * CAST((started_at - ?) / ? AS INTEGER)"
    parameters = () if bins is None else (first, width, first, width)
    for start, *sums in connection.execute(
        f"SELECT {at} AS at, {_SUMS} {_COUNTED} AND run = ? AND outcome <> {LIVE} {where}"
        f" GROUP BY at HAVING at IS NOT NULL ORDER BY at LIMIT {MAX_STEPS}",
        (*parameters, run, *values),
    ):
        yield start, AttemptSums(*sums)


def bins_of(tasks: TaskSums) -> tuple[float, float]:
    """The start and the width of the bins of a curve over time, in seconds."""
    total = AttemptSums.joined(tasks.values())
    return total.started_at, max(1.0, (total.newest_at - total.started_at) / CURVE_POINTS)


def summary_of(run: str, tasks: TaskSums) -> RunSummary:
    total = AttemptSums.joined(tasks.values())
    return RunSummary(
        name=run,
        counts=total.counts,
        tasks=len(tasks),
        mean_reward=total.reward.mean,
        started_at=total.started_at,
        newest_at=total.newest_at,
        pinned=not total.unpinned,
    )


def report_of(
    run: str,
    sums: TaskSums,
    lost: Mapping[str, int],
    points: Mapping[float, AttemptSums],
    curve_by: Literal["step", "time"],
) -> RunReport:
    tasks = _task_reports(sums)
    most_attempts = max((task.counts.finished for task in tasks.values()), default=0)
    several = len({key.suite for key in tasks}) > 1
    passes: list[PassAtK] = []
    for k in powers_of_two(most_attempts):
        enough = [task for task in tasks.values() if task.counts.finished >= k]
        few = (key for key, task in tasks.items() if task.counts.finished < k)
        passes.append(
            PassAtK(
                k,
                Sums.of(task.pass_at[k] for task in enough).estimate,
                Sums.of(task.pass_all[k] for task in enough).estimate,
                tuple(f"{key.suite}:{key.task}" if several else key.task for key in few),
            )
        )
    rewards = (task.mean_reward for task in tasks.values() if task.mean_reward is not None)
    return RunReport(
        summary=summary_of(run, sums),
        tasks=tuple(tasks.values()),
        success_rate=Sums.of(task.pass_1.mean for task in tasks.values() if task.pass_1 is not None).estimate,
        task_reward=Sums.of(rewards).estimate,
        passes=tuple(passes),
        lost=dict(sorted(lost.items(), key=lambda item: (-item[1], item[0]))),
        curve=tuple(
            CurvePoint(at, point.reward.estimate, point.success.estimate, point.lowest, point.highest)
            for at, point in sorted(points.items())
        ),
        curve_by=curve_by,
    )


def compare_runs(runs: Sequence[tuple[str, TaskSums]]) -> RunComparison:
    """Two runs or more by task, with the differences from the first."""
    by_run = [_task_reports(sums) for _, sums in runs]
    tasks: list[TaskComparison] = []
    for key in sorted({key for reports in by_run for key in reports}):
        reports = tuple(of_run.get(key) for of_run in by_run)
        first, *others = (None if each is None else each.pass_1 for each in reports)
        differences = tuple(
            other.mean - first.mean if first is not None and other is not None else None for other in others
        )
        tasks.append(TaskComparison(key.suite, key.task, reports, differences))
    paired = zip(*(task.differences for task in tasks), strict=True)
    return RunComparison(
        tuple(summary_of(run, sums) for run, sums in runs),
        tuple(tasks),
        tuple(Sums.of(each for each in differences if each is not None).estimate for differences in paired),
    )


def _task_reports(tasks: TaskSums) -> dict[TaskKey, TaskReport]:
    """The reports of a run's tasks, by suite and name."""
    reports: dict[TaskKey, TaskReport] = {}
    for key, sums in sorted(tasks.items()):
        n, c = sums.counts.finished, sums.counts.successes
        ks = powers_of_two(n)
        reports[key] = TaskReport(
            suite=key.suite,
            task=key.task,
            counts=sums.counts,
            pass_1=sums.success.estimate,
            mean_reward=sums.reward.mean,
            mean_turns=Sums(sums.with_turns, sums.turns).mean,
            mean_calls=Sums(sums.with_calls, sums.calls).mean,
            pass_at={k: pass_at(k, n, c) for k in ks},
            pass_all={k: pass_all(k, n, c) for k in ks},
        )
    return reports
