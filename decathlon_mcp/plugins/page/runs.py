"""Pages of runs: the list, a run's numbers and episodes, a search in a run's calls, and runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, cast

from starlette.exceptions import HTTPException
from starlette.responses import Response

from decathlon_mcp.plugins.history.values import (
    FAILURES_FIRST,
    CallEntry,
    EpisodeQuery,
    EpisodeSummary,
    RunColumn,
    RunComparison,
    RunReport,
    TaskComparison,
    TaskReport,
)
from decathlon_mcp.plugins.page import plots
from decathlon_mcp.plugins.page.episode_pages import EPISODE_COLUMNS, MAX_SEARCH_CHARACTERS, order_of
from decathlon_mcp.plugins.page.rendering import query
from decathlon_mcp.plugins.page.site import Sorting, Visit

RUN_COLUMNS = ("-newest", "run", "-success", "-reward", "-episodes", "-lost", "-tasks")
TASK_COLUMNS = ("task", "pass", "-reward", "-attempts", "-lost", "-calls", "-turns")
MAX_GRID_EPISODES = 2_000
"""Episodes of a run that are read for the cells beside its tasks: the newest."""
MAX_TASK_CELLS = 64
"""Cells beside a task, the newest: of a training's hundreds of attempts they would fill screens."""
RUN_EPISODES = 50
MIN_PER_POINT = 3
"""Attempts for each point of a curve against time."""
COMPARED_RUNS = 100
"""Names that the page to compare proposes."""
LETTERS = "ABCDEFGH"
"""By these the runs of a comparison are named in its table."""
MAX_COMPARED = len(LETTERS)
SEARCH_SECONDS = 3.0
"""From then on no further episode is read: the page has a link that goes on."""
MAX_FOUND = 100
BATCH = 20
"""Episodes between two looks at the clock. A page of them has a cursor, by which the search goes on."""
EXCERPT_CHARACTERS = 60
"""Before and behind what was found."""


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
    newest = visit.history.episodes(EpisodeQuery(run=name, owner=owner), limit=MAX_GRID_EPISODES)
    cells = _cells(newest.items)
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
        cells={task: of_task[-MAX_TASK_CELLS:] for task, of_task in cells.items()},
        cells_are_cut=newest.cursor is not None or max(map(len, cells.values()), default=0) > MAX_TASK_CELLS,
        several_suites=len({task.suite for task in report.tasks}) > 1,
        episodes=episodes,
        sorting=sorting,
        may_change=visit.site.registry is not None,
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
    """`/compare?run=RUN&run=RUN…`: up to MAX_COMPARED runs side by side."""
    owner = visit.viewer.owner
    wanted = [*dict.fromkeys(filter(None, visit.request.query_params.getlist("run")))]
    names = visit.history.run_names(owner=owner, limit=COMPARED_RUNS)
    if len(wanted) > MAX_COMPARED:
        raise HTTPException(400, f"At most {MAX_COMPARED} runs can be compared, not {len(wanted)}.")
    comparison = None
    if len(wanted) > 1:
        comparison = visit.history.compare(wanted, owner=owner)
        if comparison is None:
            missing = [name for name in wanted if visit.history.run(name, owner=owner) is None]
            raise HTTPException(404, f"There is no run {' and no run '.join(missing)}.")
    reports = [visit.history.run(name, owner=owner) for name in wanted] if comparison is not None else []
    curves = [report.curve for report in reports if report is not None and report.curve_by == "step"]
    columns = ["-spread", "task", *(f"-{letter}" for letter in LETTERS[: len(wanted)])]
    sorting = Sorting.of(visit, "/compare", columns, "-spread", parameters={"run": wanted})
    return visit.render(
        "compare.html",
        comparison=comparison,
        curves=plots.curves(curves, LETTERS) if curves and len(curves) == len(wanted) else None,
        tasks=[] if comparison is None else sorting.sorted(comparison.tasks, _comparison_keys(len(wanted))),
        pairs={} if comparison is None else _pairs(visit, comparison),
        names=names,
        wanted=wanted,
        letters=LETTERS,
        most=MAX_COMPARED,
        sorting=sorting,
    )


def _comparison_keys(runs: int) -> Mapping[str, Callable[[TaskComparison], Any]]:
    """What the table of a comparison is sorted by: the task, the success of a run, or how far runs differ."""
    keys: dict[str, Callable[[TaskComparison], Any]] = {
        "task": lambda task: (task.task, task.suite),
        "spread": spread,
    }
    for number, letter in enumerate(LETTERS[:runs]):
        keys[letter] = lambda task, number=number: task.rates[number]
    return keys


def spread(task: TaskComparison) -> float | None:
    """From the least success of a run to the most; None unless two have finished attempts."""
    rates = [rate for rate in task.rates if rate is not None]
    return max(rates) - min(rates) if len(rates) > 1 else None


def _pairs(visit: Visit, comparison: RunComparison) -> dict[tuple[str, str], tuple[str, str]]:
    """For each task two episodes to read side by side, of the runs that differ most in it.

    If possible with different results.
    """
    found: list[dict[tuple[str, str], list[EpisodeSummary]]] = []
    for run in comparison.runs:
        query = EpisodeQuery(run=run.name, owner=visit.viewer.owner)
        found.append({})
        for episode in visit.history.episodes(query, limit=MAX_GRID_EPISODES).items:
            if not episode.is_live and episode.has_files:
                found[-1].setdefault((episode.suite, episode.task), []).append(episode)
    pairs: dict[tuple[str, str], tuple[str, str]] = {}
    for task in comparison.tasks:
        key = task.suite, task.task
        rated = [
            (rate, number)
            for number, rate in enumerate(task.rates)
            if rate is not None and key in found[number]
        ]
        if len(rated) < 2:
            continue
        least, most = min(rated), max(rated, key=lambda each: (each[0], -each[1]))
        # With equal rates these are the same run: then the first two.
        chosen = sorted({least[1], most[1]} if least[1] != most[1] else {rated[0][1], rated[1][1]})
        left, right = (found[number][key] for number in chosen)
        differing = ((x, y) for x in left for y in right if x.success is not y.success)
        best = next(differing, (left[0], right[0]))
        pairs[key] = (best[0].public_id, best[1].public_id)
    return pairs


@dataclass(frozen=True, slots=True)
class Found:
    """An episode with such a call. `call`: number of the first. `path`: of the page that shows it.

    `excerpt`: what is before the text, the text, and what is behind it; None if it is not near the beginning
    of the arguments or of the reply.
    """

    episode: EpisodeSummary
    call: int
    name: str
    path: str
    excerpt: tuple[str, str, str] | None


@dataclass(frozen=True, slots=True)
class Search:
    """The episodes `found` among so many `episodes`. `cursor`: where to go on; None if all were searched."""

    text: str
    found: tuple[Found, ...]
    episodes: int
    cursor: str | None


def search_run(visit: Visit, run: str, text: str) -> Search:
    """Search from the cursor of the visit on. Blocks for SEARCH_SECONDS and one batch."""
    wanted = EpisodeQuery(run=run, owner=visit.viewer.owner, order=FAILURES_FIRST)
    found: list[Found] = []
    episodes, cursor, end = 0, visit.query("cursor") or None, monotonic() + SEARCH_SECONDS
    while True:
        page = visit.history.episodes(wanted, limit=BATCH, cursor=cursor)
        for episode in page.items:
            call = visit.history.find(episode.public_id, text) if episode.has_files else None
            if call is not None:
                found.append(_found(visit, episode, call, text))
        episodes += len(page.items)
        cursor = page.cursor
        if cursor is None or len(found) >= MAX_FOUND or monotonic() > end:
            return Search(text, tuple(found), episodes, cursor)


def _found(visit: Visit, episode: EpisodeSummary, call: int, text: str) -> Found:
    entries = visit.history.calls(episode.public_id, call, call)
    entry = next((entry for entry in entries if isinstance(entry, CallEntry)), None)
    texts = [part.raw for part in (entry.arguments, entry.reply) if part] if entry else []
    path = f"/e/{episode.public_id}?{query({'call': call, 'q': text})}#c{call}"
    excerpt = next(filter(None, (_excerpt(each, text) for each in texts)), None)
    return Found(episode, call, entry.name if entry else "", path, excerpt)


def _excerpt(text: str, wanted: str) -> tuple[str, str, str] | None:
    # Of texts that grow or shrink in lower case the excerpt is a little beside it, which harms nobody.
    start = text.lower().find(wanted.lower())
    if start < 0:
        return None
    end = start + len(wanted)
    before = text[max(0, start - EXCERPT_CHARACTERS) : start]
    return before, text[start:end], text[end : end + EXCERPT_CHARACTERS]
