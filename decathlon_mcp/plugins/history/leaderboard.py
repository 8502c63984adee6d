"""`runs --leaderboard`: the numbers of a run over a split, as leaderboards of Toolathlon have them.

An attempt that was not made is no success. So each task counts with as many attempts as the task with the
most has, and a task that was not played with none that succeeded: leaving tasks out cannot make a run better.
A lost attempt is no success either, unless the same attempt, by its label, was played again with a reward.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import NamedTuple

from decathlon_mcp.app import read_catalogue
from decathlon_mcp.catalogue.draws import TaskFilter, filter_tasks
from decathlon_mcp.cli.output import print_json, printed
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.list_runs import unknown_run
from decathlon_mcp.plugins.history.numbers import Sums, pass_all, pass_at
from decathlon_mcp.plugins.history.queries import TaskKey
from decathlon_mcp.plugins.history.values import EpisodeQuery, EpisodeSummary, Estimate
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.lock import check_state_folder

K = 3
"""Attempts that leaderboards make at each task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaderboard:
    """One run over the `tasks` of a split. Tasks are named by their ids.

    `attempts`: at the task with the most finished ones. `pass_1`: the mean of the success rates of the first,
    second, … attempts at all tasks; `spread` is their standard deviation, None below two. `pass_at_3`,
    `pass_all_3`: None below three attempts. `turns`: over the episodes that have a verdict with turns.
    `missing`: tasks without a finished attempt. `fewer`: number of attempts of those that have some, but
    fewer than `attempts`. `lost`, `live`: episodes at these tasks; a lost one is an attempt without success,
    a live one none. `others`: tasks of the run that are not in the split.
    """

    run: str
    tasks: int
    attempts: int
    pass_1: float
    spread: float | None
    rates: tuple[float, ...]
    pass_at_3: float | None
    pass_all_3: float | None
    turns: Estimate | None
    missing: tuple[str, ...]
    fewer: dict[str, int]
    lost: int
    live: int
    others: tuple[str, ...]


def leaderboard(history: EpisodeHistory, run: str, tasks: Collection[TaskKey]) -> Leaderboard | None:
    """The numbers of a run over these tasks, at least one; None if the run has no episodes."""
    wanted = sorted(set(tasks))
    played: dict[TaskKey, list[_Attempt]] = {key: [] for key in wanted}
    live, others, is_known = 0, set[str](), False
    for episode in history.all_episodes(EpisodeQuery(run=run)):
        is_known, key = True, TaskKey(episode.suite, episode.task)
        if key not in played:
            others.add(episode.task)
        elif episode.is_live:
            live += 1
        else:
            played[key].append(_Attempt.of(episode))
    if not is_known:
        return None
    made = {key: _without_replaced(some) for key, some in played.items()}
    attempts = max(map(len, made.values()))
    rates = [
        sum(some[number].succeeded for some in made.values() if number < len(some)) / len(wanted)
        for number in range(attempts)
    ]
    counts = [sum(one.succeeded for one in some) for some in made.values()]
    has_k = attempts >= K
    all_made = [one for some in made.values() for one in some]
    return Leaderboard(
        run=run,
        tasks=len(wanted),
        attempts=attempts,
        pass_1=_mean(rates) if rates else 0.0,
        spread=statistics.stdev(rates) if attempts > 1 else None,
        rates=tuple(rates),
        pass_at_3=_mean([pass_at(K, attempts, count) for count in counts]) if has_k else None,
        pass_all_3=_mean([pass_all(K, attempts, count) for count in counts]) if has_k else None,
        turns=Sums.of(one.turns for one in all_made if one.turns is not None).estimate,
        missing=tuple(key.task for key, some in made.items() if not some),
        fewer={key.task: len(some) for key, some in made.items() if 0 < len(some) < attempts},
        lost=sum(one.is_lost for one in all_made),
        live=live,
        others=tuple(sorted(others)),
    )


class _Attempt(NamedTuple):
    """A finished episode. Attempts at a task are in the order of the label `attempt`, else of their start."""

    number: float
    started_at: float
    label: str
    succeeded: bool
    is_lost: bool
    turns: int | None

    @classmethod
    def of(cls, episode: EpisodeSummary) -> _Attempt:
        label = episode.labels.get("attempt", "")
        is_number = label.isascii() and label.isdecimal() and len(label) < 10
        number = float(label) if is_number else 0.0
        succeeded = bool(episode.success)
        return cls(number, episode.started_at, label, succeeded, episode.is_lost, episode.turns)


def _without_replaced(attempts: list[_Attempt]) -> list[_Attempt]:
    """The attempts in order, without lost ones that were played again."""
    scored = {one.label for one in attempts if not one.is_lost and one.label}
    lost: dict[str, _Attempt] = {}
    kept: list[_Attempt] = []
    for one in attempts:
        if not one.is_lost or not one.label:
            kept.append(one)
        elif one.label not in scored:
            lost.setdefault(one.label, one)
    return sorted([*kept, *lost.values()])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def show_leaderboard(settings: Settings, run: str, split: str | None, *, as_json: bool) -> int:
    """Print the numbers. Raises SettingsError, SuiteError, BadRequestError."""
    check_state_folder(settings.state)
    tasks = [
        TaskKey(suite.name, name)
        for name, suite, _ in filter_tasks(
            read_catalogue(settings), TaskFilter.model_validate({"split": split})
        )
    ]
    if not tasks:
        raise BadRequestError("the suite has no tasks")
    history = EpisodeHistory([settings.state])
    board = leaderboard(history, run, tasks)
    if board is None:
        raise unknown_run(settings.state, history, run)
    if as_json:
        print_json({**asdict(board), "split": split})
    else:
        _print(board, split)
    return 0


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
