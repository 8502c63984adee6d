"""`runs --leaderboard`: the numbers of a run over all tasks of a split, from a state folder and a suite."""

from __future__ import annotations

import sys
from dataclasses import asdict

from decathlon_mcp.app import read_catalogue
from decathlon_mcp.catalogue.draws import TaskFilter, filter_tasks
from decathlon_mcp.cli.output import print_json, printed
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.leaderboard import K, Leaderboard, leaderboard
from decathlon_mcp.plugins.history.list_runs import unknown_run
from decathlon_mcp.plugins.history.queries import TaskKey
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.lock import check_state_folder


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
