"""`view`: the page over state folders, read-only, without suites, an engine or a server."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from decathlon_mcp.cli.options import DEFAULT_PORT, Flag, run_async
from decathlon_mcp.cli.usage import check_port
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.settings import default_state
from decathlon_mcp.telemetry.logs import configure_logging

VIEW_PORT = 8766


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
    folders = states or (default_state(),)
    for folder in folders:
        if not folder.is_dir():
            raise SettingsError(f"{folder} is not a folder: name the state folder of a server")
    return show_address(folders[0], port) if address else run_async(serve_view, folders, port, open)


def show_address(state: Path, port: int | None) -> int:
    """Print the address of the page that `serve` has on this folder.

    Raises SettingsError if the folder's key cannot be read or made.
    """
    from decathlon_mcp.plugins.page.access import load_or_create_page_key
    from decathlon_mcp.plugins.page.application import page_address

    key = load_or_create_page_key(state)
    sys.stdout.write(f"{page_address(key, DEFAULT_PORT if port is None else port)}\n")
    return 0


async def serve_view(states: Sequence[Path], port: int | None, opens: bool) -> int:
    """Serve the page until SIGTERM or SIGINT. Raises SettingsError."""
    # Imported late: it takes a second.
    from anyio import to_thread

    from decathlon_mcp.http.authentication import PAGE_HOST, AllowedHosts
    from decathlon_mcp.http.listening import listen
    from decathlon_mcp.http.server import serve_http
    from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
    from decathlon_mcp.plugins.page.access import PageKey, Sessions, load_or_create_page_key
    from decathlon_mcp.plugins.page.application import PageApp
    from decathlon_mcp.plugins.page.site import Site

    configure_logging("warning", "text")
    key = load_or_create_page_key(states[0])
    history = EpisodeHistory(states)
    await to_thread.run_sync(history.run_names)  # raises SettingsError for a folder of another version
    site = Site(history, Sessions(PageKey(key)), folders=tuple(map(str, states)))
    with listen("127.0.0.1", VIEW_PORT if port is None else port) as listener:
        address = f"http://{PAGE_HOST}:{listener.getsockname()[1]}/"

        def announce() -> None:
            # The key gives access to everything in the folders: a log must not have it.
            shown = f"{address}#key={key}" if sys.stdout.isatty() else address
            sys.stdout.write(f"{shown}\n")
            sys.stdout.flush()
            if opens:
                webbrowser.open(f"{address}#key={key}")

        async def nothing_to_drain() -> None:
            pass

        app = PageApp(site, AllowedHosts().answers_to)
        await serve_http(app, listener, drain=nothing_to_drain, on_ready=announce)
    return 0
