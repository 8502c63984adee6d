"""The numbers of a run, made of the sums of its tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from decathlon_client.results import pass_all, pass_at

from decathlon_mcp.plugins.history.queries import CURVE_POINTS, AttemptSums, CurveSums, TaskKey
from decathlon_mcp.plugins.history.values import (
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


@dataclass
class RunNumbers:
    """One run, from the sums of its tasks in one or several folders."""

    name: str
    _tasks: dict[TaskKey, AttemptSums] = field(default_factory=dict[TaskKey, AttemptSums])

    def add(self, task: TaskKey, sums: AttemptSums) -> None:
        """Add attempts at a task, before any property is read."""
        self._tasks.setdefault(task, AttemptSums()).add(sums)

    @cached_property
    def _all(self) -> AttemptSums:
        total = AttemptSums()
        for sums in self._tasks.values():
            total.add(sums)
        return total

    @property
    def summary(self) -> RunSummary:
        total = self._all
        return RunSummary(
            name=self.name,
            counts=total.counts,
            tasks=len(self._tasks),
            mean_reward=total.rewards.mean,
            started_at=total.started_at,
            newest_at=total.newest_at,
            pinned=not total.unpinned,
        )

    @property
    def bins(self) -> tuple[float, float]:
        """The start and the width of the bins of a curve over time, in seconds."""
        total = self._all
        return total.started_at, max(1.0, (total.newest_at - total.started_at) / CURVE_POINTS)

    @cached_property
    def tasks(self) -> dict[TaskKey, TaskReport]:
        """The tasks by suite and name."""
        return {key: _task_report(key, self._tasks[key]) for key in sorted(self._tasks)}

    def report(
        self, lost: Mapping[str, int], curve: Iterable[CurveSums], curve_by: Literal["step", "time"]
    ) -> RunReport:
        """The report, with what the rows say besides the sums."""
        tasks = self.tasks.values()
        return RunReport(
            summary=self.summary,
            tasks=tuple(tasks),
            success_rate=Sums.of(task.pass_1.mean for task in tasks if task.pass_1 is not None).estimate,
            task_reward=Sums.of(task.mean_reward for task in tasks if task.mean_reward is not None).estimate,
            passes=tuple(map(self._pass_at, powers_of_two(self._most_attempts))),
            lost=dict(sorted(lost.items(), key=lambda item: (-item[1], item[0]))),
            curve=_curve(curve),
            curve_by=curve_by,
        )

    @property
    def _most_attempts(self) -> int:
        return max((sums.finished for sums in self._tasks.values()), default=0)

    def _pass_at(self, k: int) -> PassAtK:
        tasks = self.tasks.items()
        enough = [task for _, task in tasks if task.counts.finished >= k]
        several = len({key.suite for key in self._tasks}) > 1
        return PassAtK(
            k,
            Sums.of(task.pass_at[k] for task in enough).estimate,
            Sums.of(task.pass_all[k] for task in enough).estimate,
            tuple(
                f"{key.suite}:{key.task}" if several else key.task
                for key, task in tasks
                if task.counts.finished < k
            ),
        )


def compare_runs(runs: Sequence[RunNumbers]) -> RunComparison:
    """Two runs or more by task, with the differences from the first."""
    tasks: list[TaskComparison] = []
    for key in sorted({key for run in runs for key in run.tasks}):
        reports = tuple(run.tasks.get(key) for run in runs)
        first, *others = (None if each is None else each.pass_1 for each in reports)
        differences = tuple(
            other.mean - first.mean if first is not None and other is not None else None for other in others
        )
        tasks.append(TaskComparison(key.suite, key.task, reports, differences))
    paired = zip(*(task.differences for task in tasks), strict=True)
    return RunComparison(
        tuple(run.summary for run in runs),
        tuple(tasks),
        tuple(Sums.of(each for each in differences if each is not None).estimate for differences in paired),
    )


def _task_report(key: TaskKey, sums: AttemptSums) -> TaskReport:
    n, c = sums.finished, sums.successes
    ks = powers_of_two(n)
    return TaskReport(
        suite=key.suite,
        task=key.task,
        counts=sums.counts,
        pass_1=Sums.of_shares(c, n).estimate,
        mean_reward=sums.rewards.mean,
        mean_turns=sums.turns.mean,
        mean_calls=sums.calls.mean,
        pass_at={k: pass_at(k, n, c) for k in ks},
        pass_all={k: pass_all(k, n, c) for k in ks},
    )


def _curve(points: Iterable[CurveSums]) -> tuple[CurvePoint, ...]:
    """The points in order; points of several folders at the same place are one."""
    by_place: dict[float, list[CurveSums]] = {}
    for point in points:
        by_place.setdefault(point.at, []).append(point)
    return tuple(_curve_point(at, by_place[at]) for at in sorted(by_place))


def _curve_point(at: float, parts: list[CurveSums]) -> CurvePoint:
    rewards, successes = Sums(), Sums()
    for part in parts:
        rewards.add(part.rewards)
        successes.add(Sums.of_shares(part.successes, part.finished))
    lowest = [part.lowest for part in parts if part.lowest is not None]
    highest = [part.highest for part in parts if part.highest is not None]
    return CurvePoint(
        at, rewards.estimate, successes.estimate, min(lowest, default=None), max(highest, default=None)
    )
