"""`runs`: the numbers of a state folder's runs. It works without a running server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from decathlon_mcp.cli.output import age, print_json, print_table, printed
from decathlon_mcp.cli.usage import report
from decathlon_mcp.errors import UnknownEpisodeError
from decathlon_mcp.plugins.history.episode_history import MAX_PAGE_ITEMS, EpisodeHistory
from decathlon_mcp.plugins.history.values import Counts, Estimate, RunReport, RunSummary, TaskReport
from decathlon_mcp.storage.lock import check_state_folder
from decathlon_mcp.types import JsonObject
from decathlon_mcp.validation import did_you_mean

_RUNS = ("run", "episodes", "live", "lost", "success", "mean reward", "tasks", "newest")
_TASKS = ("task", "episodes", "live", "lost", "success", "mean reward", "calls", "turns")


def list_runs(state: Path, run: str | None, *, as_json: bool) -> int:
    """Print the runs, or the numbers of one of them. Raises SettingsError, UnknownEpisodeError."""
    check_state_folder(state)
    history = EpisodeHistory([state])
    if run is not None:
        numbers = history.run(run)
        if numbers is None:
            raise unknown_run(state, history, run)
        _print_report(numbers, as_json=as_json)
        return 0
    runs = _all_runs(history)
    if not runs:
        report(f"no episode in {state} has a label `run`")
    if as_json:
        print_json({"runs": [_run_json(one) for one in runs]})
    else:
        print_table(_RUNS, (_run_cells(one) for one in runs))
    return 0


def compare_runs(state: Path, a: str, b: str, *, as_json: bool) -> int:
    """Print two runs by task, and the mean of the differences. Raises SettingsError, UnknownEpisodeError."""
    check_state_folder(state)
    history = EpisodeHistory([state])
    comparison = history.compare([a, b])
    if comparison is None:
        raise unknown_run(state, history, *(name for name in (a, b) if history.run(name) is None))
    if as_json:
        print_json(
            {
                "a": _run_json(comparison.runs[0]),
                "b": _run_json(comparison.runs[1]),
                "tasks": [
                    {
                        "suite": task.suite,
                        "task": task.task,
                        "a": _rate_json(task.reports[0]),
                        "b": _rate_json(task.reports[1]),
                        "difference": task.differences[0],
                    }
                    for task in comparison.tasks
                ],
                "difference": _estimate_json(comparison.differences[0]),
            }
        )
        return 0
    print_table(
        ("task", printed(a), "of", printed(b), "of", "difference"),
        (
            [task.task, *chain(*map(_rate_cells, task.reports)), _number(task.differences[0], "+.3f")]
            for task in comparison.tasks
        ),
    )
    (difference,) = comparison.differences
    if difference is None:
        sys.stdout.write("no task has finished episodes in both runs\n")
        return 0
    sys.stdout.write(
        f"difference of the success rates, {printed(b)} - {printed(a)}: {estimate_text(difference, '+.3f')} "
        f"(paired over {difference.count} tasks, with its standard error)\n"
    )
    return 0


def _all_runs(history: EpisodeHistory) -> list[RunSummary]:
    runs: list[RunSummary] = []
    cursor = None
    while True:
        page = history.runs(limit=MAX_PAGE_ITEMS, cursor=cursor)
        runs += page.items
        if (cursor := page.cursor) is None:
            return runs


def _print_report(report: RunReport, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                **_run_json(report.summary),
                "success_rate": _estimate_json(report.success_rate),
                "task_reward": _estimate_json(report.task_reward),
                "lost_reasons": dict(report.lost),
                "pass": [asdict(at) for at in report.passes],
                "tasks": [asdict(task) for task in report.tasks],
            }
        )
        return
    print_table(_TASKS, (_task_cells(task) for task in report.tasks))
    sys.stdout.write(
        f"success rate, mean over tasks: {estimate_text(report.success_rate)}\n"
        f"reward, mean over tasks: {estimate_text(report.task_reward)}\n"
    )
    for at in report.passes:
        few = f"; fewer than {at.k} episodes: {', '.join(map(printed, at.too_few))}" if at.too_few else ""
        sys.stdout.write(
            f"pass@{at.k} {estimate_text(at.pass_at)}, pass^{at.k} {estimate_text(at.pass_all)}{few}\n"
        )
    for reason, count in report.lost.items():
        sys.stdout.write(f"lost: {count}, {printed(reason)}\n")


def _run_cells(run: RunSummary) -> list[str]:
    return [run.name, *_count_cells(run.counts, run.mean_reward), str(run.tasks), age(run.newest_at)]


def _task_cells(task: TaskReport) -> list[str]:
    cells = _count_cells(task.counts, task.mean_reward)
    return [task.task, *cells, _number(task.mean_calls, ".1f"), _number(task.mean_turns, ".1f")]


def _count_cells(counts: Counts, mean_reward: float | None) -> list[str]:
    return [
        str(counts.episodes),
        str(counts.live),
        str(counts.lost),
        _number(counts.success_rate),
        _number(mean_reward),
    ]


def _rate_cells(task: TaskReport | None) -> Sequence[str]:
    if task is None or task.pass_1 is None:
        return "-", "0"
    return _number(task.pass_1.mean), str(task.pass_1.count)


def _run_json(run: RunSummary) -> JsonObject:
    counts = run.counts
    return {
        "run": run.name,
        "episodes": counts.episodes,
        "live": counts.live,
        "finished": counts.finished,
        "scored": counts.scored,
        "lost": counts.lost,
        "successes": counts.successes,
        "success_of_all": counts.success_rate,
        "mean_reward": run.mean_reward,
        "task_count": run.tasks,
        "started_at": run.started_at,
        "newest_at": run.newest_at,
        "pinned": run.pinned,
    }


def _rate_json(task: TaskReport | None) -> JsonObject | None:
    return None if task is None else _estimate_json(task.pass_1)


def _estimate_json(estimate: Estimate | None) -> JsonObject | None:
    return None if estimate is None else asdict(estimate)


def estimate_text(estimate: Estimate | None, spec: str = ".3f") -> str:
    """A mean with its standard error, as commands print it."""
    if estimate is None:
        return "-"
    error = "" if estimate.standard_error is None else f" ± {estimate.standard_error:.3f}"
    return f"{estimate.mean:{spec}}{error}"


def _number(value: float | None, spec: str = ".3f") -> str:
    return "-" if value is None else f"{value:{spec}}"


def unknown_run(state: Path, history: EpisodeHistory, *names: str) -> UnknownEpisodeError:
    """The error for names that no run has, with the runs that have similar ones."""
    shown = " and ".join(printed(repr(name)) for name in names)
    known = [run.name for run in history.runs(limit=MAX_PAGE_ITEMS).items]
    hint = "".join(printed(did_you_mean(name, known)) for name in names)
    return UnknownEpisodeError(
        f"no episode in {state} is of run {shown}{hint or '; `decathlon-mcp runs` lists the runs'}"
    )
