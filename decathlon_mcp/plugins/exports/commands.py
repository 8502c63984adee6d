"""`export`, as the command line has it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Group, Parameter

from decathlon_mcp.cli.options import EPILOGUE, NO_FILTERS, PLAYER_SECONDS, Filters, Flag, settings_model
from decathlon_mcp.cli.usage import check_not_empty, check_seconds
from decathlon_mcp.errors import BadRequestError

AGENT_IMAGE, SERVER_IMAGE = "python:3.13-slim-bookworm", "decathlon-mcp"
"""Images for agents, with Python for the solutions of bundled tasks, and of this server."""
HARBOR = Group("With --to harbor", sort_key=4)

ExportOptions = settings_model("ExportOptions", ("suite", "language", "state", "config"))
ExportSettings = Annotated[ExportOptions, Parameter(name="*")]
EXPORT_DEFAULTS = ExportOptions.model_validate({})
Image = Annotated[str, Parameter(group=HARBOR, metavar="IMAGE", validator=check_not_empty)]
Seconds = Annotated[float, Parameter(group=HARBOR, metavar="SECONDS", validator=check_seconds)]


def add_commands(app: App) -> None:
    app.command(export, help_epilogue=EPILOGUE)


def export(
    name: Annotated[str | None, Parameter(name="RUN")] = None,
    /,
    *,
    to: Annotated[Literal["jsonl", "parquet", "inspect", "html", "harbor"], Parameter(metavar="FORMAT")],
    output: Annotated[Path, Parameter(name=("--output", "-o"), metavar="FILE", env_var=())],
    all: Flag = False,  # noqa: A002
    force: Flag = False,
    agent_image: Image = AGENT_IMAGE,
    server_image: Image = SERVER_IMAGE,
    player_seconds: Seconds = PLAYER_SECONDS,
    filters: Filters = NO_FILTERS,
    settings: ExportSettings = EXPORT_DEFAULTS,
) -> int:
    """Write episodes or tasks for other tools.

    The episodes of a run, or all, are written under their public ids, with their signed verdicts.

    Parameters
    ----------
    name
        The run to write; with `--to html`, the episode.
    to
        `jsonl`: a file with an episode a line. `parquet`: a folder with tables. `inspect`: a folder with logs
        of inspect-ai. `html`: one episode's page as a file. `harbor`: a folder with tasks for Harbor, each
        with a server of one episode as a sidecar; tasks that lack something on this machine are left out.
    output
        The file or folder to write.
    all
        Write every episode that has finished.
    force
        Replace what is at the output.
    agent_image
        Image in which Harbor runs its agents.
    server_image
        Image of this server, which docs/operating.md builds.
    player_seconds
        Time limit of an attempt.
    """
    if to == "harbor":
        if name is not None or all:
            raise BadRequestError("--to harbor writes tasks, which filters choose: leave RUN and --all out")
        from decathlon_mcp.plugins.exports.export import export_tasks
        from decathlon_mcp.plugins.exports.harbor import HarborOptions

        options = HarborOptions(agent_image, server_image, player_seconds)
        return export_tasks(settings, filters, options, output, force=force)
    if filters.model_dump(exclude_defaults=True):
        raise BadRequestError(f"filters choose the tasks of --to harbor; --to {to} writes episodes")
    from decathlon_mcp.plugins.exports.export import export

    return export(settings.state, name, every=all, to=to, out=output, force=force)
