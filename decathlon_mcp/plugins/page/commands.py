"""`view`, as the command line has it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from decathlon_mcp.cli.options import Flag, run_async
from decathlon_mcp.cli.usage import check_port
from decathlon_mcp.settings import default_state


def add_commands(app: App) -> None:
    app.command(view)


def view(
    *states: Annotated[Path, Parameter(name="STATE", env_var="DECATHLON_STATE", show_env_var=False)],
    port: Annotated[int | None, Parameter(validator=check_port)] = None,
    open: Flag = False,  # noqa: A002
    address: Flag = False,
) -> int:
    """Show runs and episodes in a browser, without a server.

    Parameters
    ----------
    states
        State folders of servers, read as one. [the default one]
    port
        Port to listen on; 0 picks a free one. With `--address`, the server's port. [8766; the server's: 8765]
    open
        Open the page in this machine's browser.
    address
        Print the address of the page of a running server, with its key, and do nothing else.
    """
    from decathlon_mcp.plugins.page.view import show_address, view

    folders = states or (default_state(),)
    return show_address(folders, port) if address else run_async(view, folders, port, open)
