"""`export` and `export-tasks`, as the command line has them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from decathlon_mcp.cli.options import (
    EPILOGUE,
    NO_FILTERS,
    PLAYER_SECONDS,
    TASKS_DEFAULTS,
    Filters,
    Flag,
    StateFolder,
    TasksSettings,
)
from decathlon_mcp.cli.usage import check_not_empty, check_seconds
from decathlon_mcp.settings import default_state

AGENT_IMAGE, SERVER_IMAGE = "python:3.13-slim-bookworm", "decathlon-mcp"
"""Images for agents, with Python for the solutions of bundled tasks, and of this server."""


def add_commands(app: App) -> None:
    app.command(export, sort_key=7)
    app.command(export_tasks, sort_key=7, help_epilogue=EPILOGUE)


def export(
    words: Annotated[tuple[str, ...], Parameter(metavar="[RUN|EPISODE] OUT", negative=())],
    /,
    *,
    to: Annotated[Literal["jsonl", "parquet", "inspect", "html"], Parameter(metavar="FORMAT")],
    all: Flag = False,  # noqa: A002
    force: Flag = False,
    state: StateFolder = None,
) -> int:
    """Write episodes in a format of others, by public id, with their signed verdicts.

    Parameters
    ----------
    words
        The run, for `html` the episode, nothing with `--all`; and the file or folder to write.
    to
        `jsonl`: a file with an episode a line. `parquet`: a folder with tables. `inspect`: a folder with logs
        of inspect-ai. `html`: one episode's page as a file.
    all
        Write every episode that has finished.
    force
        Replace what is at OUT.
    """
    from decathlon_mcp.plugins.exports.export import export

    return export(state or default_state(), words, every=all, to=to, force=force)


def export_tasks(
    to: Annotated[Literal["harbor"], Parameter(metavar="FORMAT")],
    out: Annotated[Path, Parameter(metavar="OUT")],
    /,
    *,
    agent_image: Annotated[str, Parameter(metavar="IMAGE", validator=check_not_empty)] = AGENT_IMAGE,
    server_image: Annotated[str, Parameter(metavar="IMAGE", validator=check_not_empty)] = SERVER_IMAGE,
    player_seconds: Annotated[float, Parameter(metavar="SECONDS", validator=check_seconds)] = PLAYER_SECONDS,
    force: Flag = False,
    filters: Filters = NO_FILTERS,
    settings: TasksSettings = TASKS_DEFAULTS,
) -> int:
    """Write tasks for another framework, each with this server as a sidecar.

    Such a server holds one episode. Tasks that lack something on this machine are left out.

    Parameters
    ----------
    to
        `harbor`: a folder of tasks in Harbor's format.
    out
        The folder to write.
    agent_image
        Image in which the framework runs its agents.
    server_image
        Image of this server, which docs/container.md builds.
    player_seconds
        Time limit of an attempt.
    force
        Replace an earlier export at OUT.
    """
    from decathlon_mcp.plugins.exports.export import export_tasks
    from decathlon_mcp.plugins.exports.harbor import HarborOptions

    options = HarborOptions(agent_image, server_image, player_seconds)
    return export_tasks(settings, filters, options, out, force=force)
