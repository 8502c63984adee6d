"""`episodes`, `show`, `runs`, `diff` and `leaderboard`, as the command line has them."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from decathlon_mcp.cli.options import TASKS_DEFAULTS, Flag, Handles, LabelFilter, StateFolder, TasksSettings
from decathlon_mcp.labels import parse_labels
from decathlon_mcp.settings import default_state


def add_commands(app: App) -> None:
    app.command(episodes, sort_key=7)
    app.command(runs, sort_key=7)
    app.command(diff, sort_key=7)
    app.command(leaderboard, sort_key=7)
    app.command(show, sort_key=7)


def episodes(
    *,
    run: Annotated[str | None, Parameter(metavar="RUN")] = None,
    label: LabelFilter = (),
    task: Annotated[str | None, Parameter(metavar="ID")] = None,
    failed: Flag = False,
    all: Flag = False,  # noqa: A002
    json: Flag = False,
    handles: Handles = False,
    state: StateFolder = None,
) -> int:
    """List the episodes of this machine's servers.

    Without a filter these are the live ones and the last that finished.

    Parameters
    ----------
    run
        List every episode of this run.
    task
        List every episode of this task.
    failed
        List every episode that finished without success, lost ones included.
    all
        List every episode that is kept, also finished ones that replay or branch from others.
    json
        Print `{"episodes": [...]}`.
    """
    from decathlon_mcp.plugins.history.list_episodes import list_episodes
    from decathlon_mcp.plugins.history.values import EpisodeQuery

    query = EpisodeQuery(run=run, labels=parse_labels(label), task=task, failed=failed or None)
    return list_episodes(state or default_state(), query, every=all, as_json=json, handles=handles)


def runs(
    run: Annotated[str | None, Parameter(metavar="RUN")] = None,
    /,
    *,
    json: Flag = False,
    state: StateFolder = None,
) -> int:
    """List the runs of this machine's servers, or show the numbers of one.

    A run is the episodes with the same label `run`. Its success rate is over all finished episodes.

    Parameters
    ----------
    run
        Show the tasks of this run, pass@k and why episodes were lost.
    json
        Print one JSON object.
    """
    from decathlon_mcp.plugins.history.list_runs import list_runs

    return list_runs(state or default_state(), run, as_json=json)


def diff(
    a: Annotated[str, Parameter(metavar="RUN")],
    b: Annotated[str, Parameter(metavar="RUN")],
    /,
    *,
    json: Flag = False,
    state: StateFolder = None,
) -> int:
    """Compare two runs by task.

    The difference of their success rates is paired: over the tasks that both have, with its standard error.

    Parameters
    ----------
    a
        The run to compare with.
    b
        The run whose difference is shown.
    json
        Print one JSON object.
    """
    from decathlon_mcp.plugins.history.list_runs import compare_runs

    return compare_runs(state or default_state(), a, b, as_json=json)


def leaderboard(
    run: Annotated[str, Parameter(metavar="RUN")],
    /,
    *,
    split: Annotated[str | None, Parameter(metavar="NAME")] = None,
    json: Flag = False,
    settings: TasksSettings = TASKS_DEFAULTS,
) -> int:
    """Show a run over all tasks of a split: pass@1, pass@3, pass^3, turns.

    Tasks that were not played are named, and count as no success.

    Parameters
    ----------
    run
        The run, as `runs` lists it.
    split
        The split, e.g. `test`. [all tasks of the suite]
    json
        Print one JSON object.
    """
    from decathlon_mcp.plugins.history.show_leaderboard import show_leaderboard

    return show_leaderboard(settings, run, split, as_json=json)


def show(
    name: Annotated[str, Parameter(metavar="EPISODE")],
    /,
    *,
    json: Flag = False,
    handles: Handles = False,
    state: StateFolder = None,
) -> int:
    """Show everything that is kept of one episode.

    Parameters
    ----------
    name
        The episode's id, as `episodes` lists it, or the beginning of it; or the handle.
    json
        Print one JSON object.
    """
    from decathlon_mcp.plugins.history.list_episodes import show_episode

    return show_episode(state or default_state(), name, as_json=json, handles=handles)
