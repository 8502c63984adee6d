"""`play`, as the command line has it."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from decathlon_mcp.cli.options import ADDRESS, EPILOGUE, PLAY_DEFAULTS, PlaySettings, names_server, run_async


def add_commands(app: App) -> None:
    app.command(play, help_epilogue=EPILOGUE)


def play(
    task: Annotated[str | None, Parameter(name="TASK")] = None,
    /,
    *,
    url: Annotated[str | None, Parameter(group=ADDRESS, metavar="URL")] = None,
    script: Annotated[str | None, Parameter(metavar="FILE", env_var=(), allow_leading_hyphen=True)] = None,
    settings: PlaySettings = PLAY_DEFAULTS,
) -> int:
    """Play a task by hand in a browser, or from a file of calls.

    Parameters
    ----------
    task
        The task to play. [chosen from a list]
    url
        A running server; its token is read from `DECATHLON_TOKEN`. [`DECATHLON_URL`, if no suite is named;
        else a server in this process]
    script
        File with one JSON call per line, `-` for stdin; prints the verdict. Exit status 0 only on a pass.
    """
    from decathlon_mcp.plugins.play.play import play

    return run_async(play, None if names_server(url, settings) else settings, task, url, script)
