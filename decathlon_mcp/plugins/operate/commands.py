"""`token`, `key`, `verify` and `gc`, as the command line has them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from decathlon_mcp.cli.options import Flag, StateFolder, run_async
from decathlon_mcp.cli.usage import check_token_name
from decathlon_mcp.settings import default_state


def add_commands(app: App) -> None:
    for command in (token, key, verify, gc):
        app.command(command)


def token(
    name: Annotated[str, Parameter(name="NAME", validator=check_token_name)],
    /,
    *,
    role: Literal["player", "controller", "admin"] = "player",
    secret: Path | None = None,
) -> int:
    """Create a token for a client of `serve --tokens`.

    The secret is printed on stderr, the token's line for the file of `--tokens` on stdout.

    Parameters
    ----------
    name
        Name of the token's owner.
    role
        `admin` may use every episode, the other roles only their own.
    secret
        New file for the secret, instead of stderr; only its owner can read it.
    """
    from decathlon_mcp.plugins.operate.keys import make_token

    return make_token(name, role, secret)


def key(*, state: StateFolder = None) -> int:
    """Print the public key that verdicts are signed with.

    A state folder without a key gets one.
    """
    from decathlon_mcp.plugins.operate.keys import show_key

    return show_key(state)


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
    from decathlon_mcp.plugins.operate.signatures import verify_files

    return verify_files((file, *files), key, state)


def gc(
    *,
    dry_run: Flag = False,
    abandon: Flag = False,
    json: Flag = False,
    state: StateFolder = None,
) -> int:
    """Remove the leftovers of crashed servers.

    Running servers, and what belongs to them, are never touched.

    Parameters
    ----------
    dry_run
        Only say what would be removed.
    abandon
        Also remove the episodes that the next `serve` could continue.
    json
        Print `{"removed": [...], "kept": {...}}`.
    """
    from decathlon_mcp.plugins.operate.gc import collect

    return run_async(collect, state or default_state(), dry_run, abandon, json)
