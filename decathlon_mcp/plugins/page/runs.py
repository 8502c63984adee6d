"""Runs: their list, the numbers and episodes of one, and two side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from starlette.exceptions import HTTPException
from starlette.responses import Response

from decathlon_mcp.plugins.history.values import (
    EpisodeQuery,
    EpisodeSummary,
    RunColumn,
    RunReport,
    TaskComparison,
    TaskReport,
)
from decathlon_mcp.plugins.page import plots
from decathlon_mcp.plugins.page.episodes import EPISODE_COLUMNS, MAX_SEARCH_CHARACTERS, order_of
from decathlon_mcp.plugins.page.searching import search_run
from decathlon_mcp.plugins.page.site import Visit
from decathlon_mcp.plugins.page.sorting import Sorting

RUN_COLUMNS = ("-newest", "run", "-success", "-reward", "-episodes", "-lost", "-tasks")
TASK_COLUMNS = ("task", "pass", "-reward", "-attempts", "-lost", "-calls", "-turns")
MAX_GRID_EPISODES = 2_000
"""Episodes of a run that are cells beside their tasks: the newest."""
RUN_EPISODES = 50
MIN_PER_POINT = 3
"""Attempts for each point of a curve against time."""
COMPARED_RUNS = 100


@dataclass(frozen=True, slots=True)
class Cell:
    """One episode beside its task. `shade`: 0 to 10, by its reward."""

    episode: EpisodeSummary
    kind: str
    shade: int
    text: str

    @classmethod
    def of(cls, episode: EpisodeSummary) -> Cell:
        if episode.is_live:
            return cls(episode, "live", 0, "●")
        if episode.reward is None:
            return cls(episode, "lost", 0, "∅")
        shade = round(10 * min(1.0, max(0.0, episode.reward)))
        if episode.success:
            return cls(episode, "success", shade, "✓")
        # Two digits, without the zero before the point.
        text = f"{episode.reward:.2f}".lstrip("0") if 0 < episode.reward < 1 else f"{episode.reward:g}"[:4]
        return cls(episode, "failed", shade, text)


def runs(visit: Visit) -> Response:
    """`/runs`"""
    if name := visit.query("name"):
        return _run(visit, name)
    owner = visit.viewer.owner
    sorting = Sorting.of(visit, "/runs", RUN_COLUMNS, "-newest", parameters={})
    page = visit.history.runs(
        owner=owner,
        by=cast("RunColumn", sorting.column),
        descending=sorting.descending,
        cursor=visit.query("cursor") or None,
    )
    played = page.items or visit.history.episodes(EpisodeQuery(owner=owner), limit=1).items
    return visit.render("runs.html", runs=page, sorting=sorting, played=bool(played))


def run(visit: Visit) -> Response:
    """`/runs/{run}`"""
    return _run(visit, visit.path["run"])


def _run(visit: Visit, name: str) -> Response:
    owner = visit.viewer.owner
    report = visit.history.run(name, owner=owner)
    if report is None:
        raise HTTPException(404, f"There is no run {name}.")
    if text := visit.query("q").strip()[:MAX_SEARCH_CHARACTERS]:
        return visit.render("found.html", run=name, search=search_run(visit, name, text))
    cells = visit.history.episodes(EpisodeQuery(run=name, owner=owner), limit=MAX_GRID_EPISODES)
    order, by = visit.query("sort"), visit.query("by")
    passes = [each for each in report.passes if each.k > 1]
    columns = [*TASK_COLUMNS, *(f"-pass{sign}{each.k}" for each in passes for sign in "@^")]
    by_task = Sorting.of(
        visit,
        "/runs",
        columns,
        "pass",
        parameters={"name": name, "sort": order},
        parameter="by",
        section="tasks",
    )
    sorting = Sorting.of(
        visit,
        "/runs",
        [column for column in EPISODE_COLUMNS if column != "run"],
        "-result",
        parameters={"name": name, "by": by},
        section="episodes",
    )
    query = EpisodeQuery(run=name, owner=owner, order=order_of(sorting))
    episodes = visit.history.episodes(query, limit=RUN_EPISODES, cursor=visit.query("cursor") or None)
    others = visit.history.run_names(owner=owner, limit=COMPARED_RUNS)
    return visit.render(
        "run.html",
        report=report,
        run=report.summary,
        curve=plots.curve(report.curve, report.curve_by) if _has_curve(report) else None,
        tasks=by_task.sorted(report.tasks, _task_keys(report)),
        by_task=by_task,
        passes=passes,
        cells=_cells(cells.items),
        cells_are_cut=cells.cursor is not None,
        several_suites=len({task.suite for task in report.tasks}) > 1,
        episodes=episodes,
        sorting=sorting,
        may_change=visit.site.control is not None,
        others=[other for other in others if other != name],
    )


def _has_curve(report: RunReport) -> bool:
    """Whether a curve says something: against time, points of one attempt each only show its task."""
    points = len(report.curve)
    return points > 1 and (
        report.curve_by == "step" or report.summary.counts.finished >= MIN_PER_POINT * points
    )


def _cells(episodes: Sequence[EpisodeSummary]) -> Mapping[tuple[str, str], list[Cell]]:
    """The episodes of each suite and task in the order of their starts."""
    cells: dict[tuple[str, str], list[Cell]] = {}
    for episode in sorted(episodes, key=lambda each: each.started_at):
        cells.setdefault((episode.suite, episode.task), []).append(Cell.of(episode))
    return cells


def _task_keys(report: RunReport) -> Mapping[str, Callable[[TaskReport], Any]]:
    """What the table of tasks is sorted by; of None nothing is known."""
    keys: dict[str, Callable[[TaskReport], Any]] = {
        "task": lambda task: (task.task, task.suite),
        "pass": lambda task: task.pass_1 and task.pass_1.mean,
        "reward": lambda task: task.mean_reward,
        "attempts": lambda task: task.counts.finished,
        "lost": lambda task: task.counts.lost,
        "calls": lambda task: task.mean_calls,
        "turns": lambda task: task.mean_turns,
    }
    for k in (each.k for each in report.passes):
        keys[f"pass@{k}"] = lambda task, k=k: task.pass_at.get(k)
        keys[f"pass^{k}"] = lambda task, k=k: task.pass_all.get(k)
    return keys


def compare(visit: Visit) -> Response:
    """`/compare?a=RUN&b=RUN`"""
    owner = visit.viewer.owner
    a, b = visit.query("a"), visit.query("b")
    names = visit.history.run_names(owner=owner, limit=COMPARED_RUNS)
    comparison = None
    if a and b:
        comparison = visit.history.compare(a, b, owner=owner)
        if comparison is None:
            raise HTTPException(404, f"There are no two runs {a} and {b}.")
    pairs: dict[tuple[str, str], tuple[str, str]] = {}
    ordered: list[TaskComparison] = []
    if comparison is not None:
        pairs = _pairs(visit, a, b)
        ordered = sorted(comparison.tasks, key=lambda each: (-abs(each.difference or 0.0), each.task))
    return visit.render(
        "compare.html", comparison=comparison, ordered=ordered, names=names, a=a, b=b, pairs=pairs
    )


def _pairs(visit: Visit, a: str, b: str) -> dict[tuple[str, str], tuple[str, str]]:
    """For each task an episode of either run to read side by side: if possible with different results."""
    found: dict[tuple[str, str], tuple[list[EpisodeSummary], list[EpisodeSummary]]] = {}
    for side, name in enumerate((a, b)):
        query = EpisodeQuery(run=name, owner=visit.viewer.owner)
        for episode in visit.history.episodes(query, limit=MAX_GRID_EPISODES).items:
            if not episode.is_live and episode.has_files:
                found.setdefault((episode.suite, episode.task), ([], []))[side].append(episode)
    pairs: dict[tuple[str, str], tuple[str, str]] = {}
    for task, (left, right) in found.items():
        best = [(x, y) for x in left for y in right if x.success is not y.success][:1]
        best += [(x, y) for x in left[:1] for y in right[:1]]
        if best:
            pairs[task] = (best[0][0].public_id, best[0][1].public_id)
    return pairs
