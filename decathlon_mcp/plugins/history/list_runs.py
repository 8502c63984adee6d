"""`runs`: the numbers of a state folder's runs, and leaderboards. It works without a running server.

On a leaderboard, as Toolathlon's are, an attempt that was not made is no success. So each task counts with
as many attempts as the task with the most has, and a task that was not played with none that succeeded:
leaving tasks out cannot make a run better. A lost attempt is no success either, unless the same attempt, by
its label, was played again with a reward.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

from cyclopts import Parameter
from decathlon_client.batch_results import pass_all, pass_at

from decathlon_mcp.app import read_catalogue
from decathlon_mcp.catalogue.draws import TaskFilter, filter_tasks
from decathlon_mcp.cli.options import Flag, settings_model
from decathlon_mcp.cli.output import age, print_json, print_table, printed
from decathlon_mcp.cli.usage import report
from decathlon_mcp.errors import BadRequestError, UnknownEpisodeError
from decathlon_mcp.plugins.history.episode_history import MAX_PAGE_ITEMS, EpisodeHistory
from decathlon_mcp.plugins.history.reports import TaskKey
from decathlon_mcp.plugins.history.values import (
    Counts,
    EpisodeQuery,
    EpisodeSummary,
    Estimate,
    RunSummary,
    Sums,
    TaskReport,
)
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.lock import check_state_folder
from decathlon_mcp.types import JsonObject
from decathlon_mcp.validation import did_you_mean

RunsOptions = settings_model("RunsOptions", ("suite", "language", "state", "config"))
RunsSettings = Annotated[RunsOptions, Parameter(name="*")]
RUNS_DEFAULTS = RunsOptions.model_validate({})


def runs(
    run: Annotated[str | None, Parameter(name="RUN")] = None,
    /,
    *,
    compare: Annotated[str | None, Parameter(metavar="RUN", env_var=())] = None,
    leaderboard: Flag = False,
    split: Annotated[str | None, Parameter(metavar="NAME")] = None,
    json: Flag = False,
    settings: RunsSettings = RUNS_DEFAULTS,
) -> int:
    """List runs, show the numbers of one, or compare two.

    A run is the episodes with the same label `run`. Its success rate is over all finished episodes.

    Parameters
    ----------
    run
        The run whose tasks, pass@k and reasons of lost episodes are shown.
    compare
        Show by task what changed from RUN to this run. The difference of the success rates is paired: it is
        over the tasks that both runs have, and has a standard error.
    leaderboard
        Show pass@1, pass@3, pass^3 and turns over all tasks of a split. Tasks that were not played are named,
        and count as no success.
    split
        The split of the leaderboard, such as `test`. [all tasks of the suite]
    json
        Print one JSON object.
    """
    if run is None and (compare is not None or leaderboard):
        option = "--leaderboard" if compare is None else f"--compare {compare}"
        raise BadRequestError(f"name the run: decathlon-mcp runs RUN {option}")
    if leaderboard and compare is not None:
        raise BadRequestError("--leaderboard and --compare show different tables: choose one")
    if split is not None and not leaderboard:
        raise BadRequestError("--split chooses the tasks of --leaderboard, which was not given")
    check_state_folder(settings.state)
    history = EpisodeHistory([settings.state])
    if run is None:
        return _list_runs(history, settings.state, as_json=json)
    if compare is not None:
        shown = _compare(history, run, compare, as_json=json)
    elif leaderboard:
        shown = _show_leaderboard(history, settings, run, split, as_json=json)
    else:
        shown = _show_run(history, run, as_json=json)
    if not shown:
        unknown = [name for name in (run, compare) if name is not None and history.run(name) is None]
        raise unknown_run(settings.state, history, *unknown)
    return 0


_RUNS = ("run", "episodes", "live", "lost", "success", "mean reward", "tasks", "newest")
_TASKS = ("task", "episodes", "live", "lost", "success", "mean reward", "calls", "turns")


def _list_runs(history: EpisodeHistory, state: Path, *, as_json: bool) -> int:
    runs: list[RunSummary] = []
    cursor = ""
    while cursor is not None:
        page = history.runs(limit=MAX_PAGE_ITEMS, cursor=cursor or None)
        runs += page.items
        cursor = page.cursor
    if not runs:
        report(f"no episode in {state} has a label `run`")
    if as_json:
        print_json({"runs": [_run_json(one) for one in runs]})
    else:
        print_table(_RUNS, (_run_cells(one) for one in runs))
    return 0


def _compare(history: EpisodeHistory, a: str, b: str, *, as_json: bool) -> bool:
    """Print two runs by task, and the mean of the differences; False if one of them is unknown."""
    comparison = history.compare([a, b])
    if comparison is None:
        return False
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
        return True
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
        return True
    sys.stdout.write(
        f"difference of the success rates, {printed(b)} - {printed(a)}: {estimate_text(difference, '+.3f')} "
        f"(paired over {difference.count} tasks, with its standard error)\n"
    )
    return True


def _show_run(history: EpisodeHistory, run: str, *, as_json: bool) -> bool:
    """Print the numbers of a run; False if it is unknown."""
    report = history.run(run)
    if report is None:
        return False
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
        return True
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
    return True


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
    """The error for names that no run has, with the runs of similar names."""
    shown = " and ".join(printed(repr(name)) for name in names)
    known = [run.name for run in history.runs(limit=MAX_PAGE_ITEMS).items]
    hint = "".join(printed(did_you_mean(name, known)) for name in names)
    return UnknownEpisodeError(
        f"no episode in {state} is of run {shown}{hint or '; `decathlon-mcp runs` lists the runs'}"
    )


K = 3
"""Attempts that leaderboards make at each task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaderboard:
    """One run over the `tasks` of a split. Tasks are named by their ids."""

    run: str
    tasks: int
    attempts: int
    """At the task with the most finished attempts."""
    pass_1: float
    """The mean of `rates`."""
    spread: float | None
    """The standard deviation of `rates`; None below two."""
    rates: tuple[float, ...]
    """Success rates of the first, second, … attempts at all tasks."""
    pass_at_3: float | None
    """None below three attempts, as is `pass_all_3`."""
    pass_all_3: float | None
    turns: Estimate | None
    """Over the episodes whose verdict has turns."""
    missing: tuple[str, ...]
    """Tasks without a finished attempt."""
    fewer: dict[str, int]
    """Attempts by task, for tasks with some, but fewer than `attempts`."""
    lost: int
    """Episodes at these tasks; each counts as an attempt without success."""
    live: int
    """Episodes at these tasks; not counted as attempts."""
    others: tuple[str, ...]
    """Tasks of the run that are not in the split."""


def leaderboard(history: EpisodeHistory, run: str, tasks: Collection[TaskKey]) -> Leaderboard | None:
    """The numbers of a run over these tasks, at least one; None if the run has no episodes."""
    wanted = sorted(set(tasks))
    played: dict[TaskKey, list[EpisodeSummary]] = {key: [] for key in wanted}
    live, others, is_known = 0, set[str](), False
    for episode in history.all_episodes(EpisodeQuery(run=run)):
        is_known, key = True, TaskKey(episode.suite, episode.task)
        if key not in played:
            others.add(episode.task)
        elif episode.is_live:
            live += 1
        else:
            played[key].append(episode)
    if not is_known:
        return None
    made = {key: _without_replaced(some) for key, some in played.items()}
    attempts = max(map(len, made.values()))
    rates = [
        sum(bool(some[number].success) for some in made.values() if number < len(some)) / len(wanted)
        for number in range(attempts)
    ]
    counts = [sum(bool(one.success) for one in some) for some in made.values()]
    has_k = attempts >= K
    all_made = [one for some in made.values() for one in some]
    return Leaderboard(
        run=run,
        tasks=len(wanted),
        attempts=attempts,
        pass_1=fmean(rates) if rates else 0.0,
        spread=stdev(rates) if attempts > 1 else None,
        rates=tuple(rates),
        pass_at_3=fmean(pass_at(K, attempts, count) for count in counts) if has_k else None,
        pass_all_3=fmean(pass_all(K, attempts, count) for count in counts) if has_k else None,
        turns=Sums.of(one.turns for one in all_made if one.turns is not None).estimate,
        missing=tuple(key.task for key, some in made.items() if not some),
        fewer={key.task: len(some) for key, some in made.items() if 0 < len(some) < attempts},
        lost=sum(one.is_lost for one in all_made),
        live=live,
        others=tuple(sorted(others)),
    )


def _without_replaced(attempts: list[EpisodeSummary]) -> list[EpisodeSummary]:
    """The attempts in order, without lost attempts that were played again."""
    scored = {one.labels.get("attempt") for one in attempts if not one.is_lost}
    lost = set[str]()
    kept: list[EpisodeSummary] = []
    for one in attempts:
        label = one.labels.get("attempt")
        if one.is_lost and label:
            if label in scored | lost:
                continue
            lost.add(label)
        kept.append(one)
    return sorted(kept, key=_place)


def _place(episode: EpisodeSummary) -> tuple[float, float, str]:
    """Attempts at a task are in the order of the label `attempt`, else of their start."""
    label = episode.labels.get("attempt", "")
    is_number = label.isascii() and label.isdecimal() and len(label) < 10
    return float(label) if is_number else 0.0, episode.started_at, label


def _show_leaderboard(
    history: EpisodeHistory, settings: Settings, run: str, split: str | None, *, as_json: bool
) -> bool:
    """Print the numbers; False if the run is unknown. Raises SettingsError, SuiteError, BadRequestError."""
    wanted = filter_tasks(read_catalogue(settings), TaskFilter.model_validate({"split": split}))
    tasks = [TaskKey(suite.name, name) for name, suite, _ in wanted]
    if not tasks:
        raise BadRequestError("the suite has no tasks")
    board = leaderboard(history, run, tasks)
    if board is not None and as_json:
        print_json({**asdict(board), "split": split})
    elif board is not None:
        _print(board, split)
    return board is not None


def _print(board: Leaderboard, split: str | None) -> None:
    where = "all tasks" if split is None else f"split {printed(split)}"
    spread = "" if board.spread is None else f" ± {board.spread:.3f}"
    turns = "-" if board.turns is None else f"{board.turns.mean:.1f}"
    lines = [
        f"run {printed(board.run)}, {where}: {board.tasks} tasks, attempts at each: {board.attempts}",
        f"pass@1 {board.pass_1:.3f}{spread}"
        + (f" (standard deviation over {board.attempts} attempts)" if spread else ""),
        f"pass@{K} {_rate(board.pass_at_3)}, pass^{K} {_rate(board.pass_all_3)}",
        f"turns {turns}",
    ]
    if board.missing:
        lines.append(f"not played, counted as no success: {len(board.missing)}: {_names(board.missing)}")
    if board.fewer:
        fewer = [f"{name} ({count})" for name, count in board.fewer.items()]
        lines.append(f"fewer attempts, the missing ones counted as no success: {_names(fewer)}")
    if board.lost:
        lines.append(f"lost, counted as no success: {board.lost}; `decathlon-mcp runs` says why")
    if board.live:
        lines.append(f"not finished, not counted: {board.live}")
    if board.others:
        lines.append(f"not in the split, not counted: {_names(board.others)}")
    sys.stdout.write("\n".join(lines) + "\n")


def _names(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(map(printed, names))


def _rate(value: float | None) -> str:
    return f"- (requires {K} attempts)" if value is None else f"{value:.3f}"
