"""`replay`, as the command line has it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from cyclopts import App, Parameter

from decathlon_mcp.cli.options import (
    ADDRESS,
    EPILOGUE,
    PLAY_DEFAULTS,
    Flag,
    PlaySettings,
    names_server,
    run_async,
)
from decathlon_mcp.cli.usage import check_positive


def add_commands(app: App) -> None:
    app.command(replay, help_epilogue=EPILOGUE)


def replay(
    name: Annotated[str, Parameter(name="EPISODE")],
    /,
    *,
    to: Annotated[int | None, Parameter(metavar="N", validator=check_positive, env_var=())] = None,
    claim: Flag = False,
    stop: Flag = False,
    outside: Flag = False,
    json: Flag = False,
    url: Annotated[str | None, Parameter(group=ADDRESS, metavar="URL")] = None,
    settings: PlaySettings = PLAY_DEFAULTS,
) -> int:
    """Repeat an episode's calls in a new one, and show which replies differ.

    Exit status 0 if all are equal, 1 if one differs, 2 if the episode could not be played.

    Parameters
    ----------
    name
        The episode's public id, as `show` lists it, the beginning of its public id, or its handle.
    to
        Only calls 1 to N. [all]
    claim
        Claim the attempt as it was claimed, grade it, and compare the verdicts too.
    stop
        Stop after the first difference.
    outside
        Replay the episode also if its task reaches what episodes share: the network, services, accounts.
    json
        Print one JSON object, with the whole replies that differ.
    url
        Replay on this server; its token is read from `DECATHLON_TOKEN`. [`DECATHLON_URL`, if no suite is
        named; else a server in this process]
    """
    from decathlon_mcp.plugins.replay.replay import ReplayOptions, replay

    options = ReplayOptions(to=to, claim=claim, stop=stop, outside=outside, as_json=json)
    return run_async(partial(replay, embedded=not names_server(url, settings)), settings, name, url, options)
