"""What `install` takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from decathlon_mcp.cli.install.programs import Machine, ProgramName

ENTRY = Group("The entry", sort_key=3)
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _fits_as_name(kind: object, name: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError("An entry's name is of letters, digits and _-, at most 64 of them.")


def install(
    program: ProgramName,
    /,
    *,
    task: Annotated[str | None, Parameter(metavar="ID")] = None,
    suite: Annotated[tuple[str, ...], Parameter(metavar="PATH", negative=(), show_default=False)] = (),
    provider: Literal["docker", "local"] | None = None,
    config: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    url: Annotated[str | None, Parameter(metavar="URL")] = None,
    with_token: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    project: Annotated[Path | None, Parameter(group=ENTRY, metavar="DIR")] = None,
    name: Annotated[str, Parameter(group=ENTRY, validator=_fits_as_name)] = "toolathlon",
    print: Annotated[bool, Parameter(group=ENTRY, negative=(), show_default=False)] = False,  # noqa: A002
    undo: Annotated[bool, Parameter(group=ENTRY, negative=(), show_default=False)] = False,
    yes: Annotated[bool, Parameter(group=ENTRY, negative=(), show_default=False)] = False,
) -> int:
    """Write an entry for this server into a desktop program's settings.

    Parameters
    ----------
    program
        Whose settings.
    task
        What it starts: an episode of this task, begun with the program. [the lobby]
    suite
        A checkout in Toolathlon's layout, or `starter`. May be given more than once. [starter]
    provider
        What opens sandboxes. [the suite's own]
    config
        File of settings.
    url
        What it starts: a bridge to this server.
    with_token
        Put the value of `DECATHLON_TOKEN` into the entry.
    project
        Write it into the settings of this folder. [the user's]
    name
        What it is called.
    print
        Print it, and touch nothing.
    undo
        Take the newest writing back.
    yes
        Write without asking.
    """
    from decathlon_mcp.cli.install import installing
    from decathlon_mcp.cli.install.wish import Wish

    wish = Wish(task, url, suite, provider, config, with_token)
    if print:
        return installing.show(program, wish, name)
    if undo:
        return installing.undo(program, name, machine=Machine(), project=project, yes=yes)
    return installing.install(program, wish, name, machine=Machine(), project=project, yes=yes)
