"""`runs` and `show`, as the command line has them."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from decathlon_mcp.cli.options import EPILOGUE, Flag, Handles, LabelFilter, StateFolder, settings_model
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.labels import parse_labels
from decathlon_mcp.settings import default_state

RunsOptions = settings_model("RunsOptions", ("suite", "language", "state", "config"))
RunsSettings = Annotated[RunsOptions, Parameter(name="*")]
RUNS_DEFAULTS = RunsOptions.model_validate({})


def add_commands(app: App) -> None:
    app.command(runs, help_epilogue=EPILOGUE)
    app.command(show)


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
    from decathlon_mcp.plugins.history.list_runs import compare_runs, list_runs, show_leaderboard

    if run is None and (compare is not None or leaderboard):
        option = "--leaderboard" if compare is None else f"--compare {compare}"
        raise BadRequestError(f"name the run: decathlon-mcp runs RUN {option}")
    if leaderboard and compare is not None:
        raise BadRequestError("--leaderboard and --compare show different tables: choose one")
    if split is not None and not leaderboard:
        raise BadRequestError("--split chooses the tasks of --leaderboard, which was not given")
    if run is not None and compare is not None:
        return compare_runs(settings.state, run, compare, as_json=json)
    if run is not None and leaderboard:
        return show_leaderboard(settings, run, split, as_json=json)
    return list_runs(settings.state, run, as_json=json)


def show(
    name: Annotated[str | None, Parameter(name="EPISODE")] = None,
    /,
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
    """List episodes, or show everything that is kept of one.

    Without a filter, the list has the live episodes and the last that finished.

    Parameters
    ----------
    name
        The episode's public id, the beginning of its public id, or its handle.
    run
        List every episode of this run.
    task
        List every episode of this task.
    failed
        List every episode that finished without success, lost ones included.
    all
        List every episode that is kept, also finished ones that replay or branch from others.
    json
        Print one JSON object; of a list `{"episodes": [...]}`.
    """
    from decathlon_mcp.plugins.history.list_episodes import list_episodes, show_episode
    from decathlon_mcp.plugins.history.values import EpisodeQuery

    folder = state or default_state()
    query = EpisodeQuery(run=run, labels=parse_labels(label), task=task, failed=failed or None)
    if name is None:
        return list_episodes(folder, query, every=all, as_json=json, handles=handles)
    if all or query != EpisodeQuery():
        raise BadRequestError("EPISODE shows one episode, filters list several: give one of the two")
    return show_episode(folder, name, as_json=json, handles=handles)
