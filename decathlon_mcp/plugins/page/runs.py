"""Runs: their list, the numbers and episodes of one, and two side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.responses import Response

from decathlon_mcp.plugins.history.values import EpisodeQuery, EpisodeSummary, RunReport, TaskComparison
from decathlon_mcp.plugins.page import plots
from decathlon_mcp.plugins.page.site import Visit

MAX_GRID_EPISODES = 2_000
"""Episodes that are cells of a run's grid: the newest."""
RUN_EPISODES = 50
MIN_PER_POINT = 3
"""Attempts for each point of a curve against time."""
COMPARED_RUNS = 100


@dataclass(frozen=True, slots=True)
class Cell:
    """One episode in the grid. `shade`: 0 to 10, by its reward."""

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
    page = visit.history.runs(owner=visit.viewer.owner, cursor=visit.query("cursor") or None)
    played = page.items or visit.history.episodes(EpisodeQuery(owner=visit.viewer.owner), limit=1).items
    return visit.render("runs.html", runs=page, played=bool(played))


def run(visit: Visit) -> Response:
    """`/runs/{run}`"""
    return _run(visit, visit.path["run"])


def _run(visit: Visit, name: str) -> Response:
    owner = visit.viewer.owner
    report = visit.history.run(name, owner=owner)
    if report is None:
        raise HTTPException(404, f"There is no run {name}.")
    query = EpisodeQuery(run=name, owner=owner)
    cells = visit.history.episodes(query, limit=MAX_GRID_EPISODES)
    first = EpisodeQuery(run=name, owner=owner, order="failures_first")
    episodes = visit.history.episodes(first, limit=RUN_EPISODES, cursor=visit.query("cursor") or None)
    others = visit.history.run_names(owner=owner, limit=COMPARED_RUNS)
    return visit.render(
        "run.html",
        report=report,
        run=report.summary,
        curve=plots.curve(report.curve, report.curve_by) if _has_curve(report) else None,
        grid=_grid(report, cells.items),
        grid_is_cut=cells.cursor is not None,
        episodes=episodes,
        may_change=visit.site.control is not None,
        others=[other for other in others if other != name],
    )


def _has_curve(report: RunReport) -> bool:
    """Whether a curve says something: against time, points of one attempt each only show its task."""
    points = len(report.curve)
    return points > 1 and (
        report.curve_by == "step" or report.summary.counts.finished >= MIN_PER_POINT * points
    )


def _grid(report: RunReport, episodes: Sequence[EpisodeSummary]) -> Mapping[str, list[Cell]]:
    """The episodes of each task in the order of their starts; the tasks with the least success first."""
    tasks = sorted(report.tasks, key=lambda task: (task.pass_1.mean if task.pass_1 else 2.0, task.task))
    grid: dict[tuple[str, str], list[Cell]] = {(task.suite, task.task): [] for task in tasks}
    for episode in sorted(episodes, key=lambda each: each.started_at):
        grid.setdefault((episode.suite, episode.task), []).append(Cell.of(episode))
    several = len({suite for suite, _ in grid}) > 1
    return {f"{suite}: {task}" if several else task: cells for (suite, task), cells in grid.items() if cells}


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
