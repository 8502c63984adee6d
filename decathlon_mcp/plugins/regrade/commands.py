"""`regrade`, as the command line has it."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from decathlon_mcp.cli.options import EPILOGUE, SANDBOX_SETTINGS, Flag, run_async, settings_model

RegradeOptions = settings_model(
    "RegradeOptions",
    (
        *(*SANDBOX_SETTINGS, "language", "network", "web"),
        *("memory_mib", "cpus", "pids", "workspace_mib"),
        *("max_sandboxes", "max_opening", "evaluation_seconds"),
    ),
)
RegradeSettings = Annotated[RegradeOptions, Parameter(name="*")]
REGRADE_DEFAULTS = RegradeOptions.model_validate({})


def add_commands(app: App) -> None:
    app.command(regrade, help_epilogue=EPILOGUE)


def regrade(
    *episodes: Annotated[str, Parameter(name="EPISODE")],
    all: Flag = False,  # noqa: A002
    task: Annotated[tuple[str, ...], Parameter(metavar="ID", negative=(), show_default=False)] = (),
    write: Flag = False,
    json: Flag = False,
    settings: RegradeSettings = REGRADE_DEFAULTS,
) -> int:
    """Grade kept attempts again with the current evaluators.

    Prints what changed. The exit status is 0 only if every attempt could be graded. `serve --keep workspace`
    keeps attempts.

    Parameters
    ----------
    episodes
        Handles of episodes, or unique beginnings of them.
    all
        All attempts that are kept in the state folder.
    task
        All kept attempts at this task. Can be repeated.
    write
        Keep each new verdict next to the old one, as `verdict-2.json` and so on.
    json
        Print one JSON object per episode and line, with the new verdict.
    """
    from decathlon_mcp.plugins.regrade.regrade import Selection, regrade

    return run_async(regrade, settings, Selection(episodes, all, task), write, json)
