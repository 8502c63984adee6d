"""The command `verify`, whose parts are imported when it runs: all commands are listed at every start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter


def add_commands(app: App) -> None:
    app.command(verify)


def verify(
    file: Annotated[Path, Parameter(name="FILE")],
    /,
    *files: Annotated[Path, Parameter(name="FILE", show=False)],
    key: Annotated[tuple[str, ...], Parameter(metavar="KEY", negative=(), show_default=False)] = (),
    state: Annotated[Path | None, Parameter(metavar="DIR")] = None,
) -> int:
    """Check the signatures of verdicts.

    The exit status is 0 only if all of them are valid.

    Parameters
    ----------
    file
        A `verdict.json`, a stored reply of `evaluate`, or a file with one verdict or reply per line. Can be
        repeated.
    key
        The server's public key (hexadecimal, base64), a file with it, or the server's URL. Can be repeated.
        [the key in the state folder]
    state
        The server's state folder, which holds the key. [the default one]
    """
    from decathlon_mcp.plugins.verify.signatures import verify_files

    return verify_files((file, *files), key, state)
