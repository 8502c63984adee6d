"""`play`: play a task by hand on the page of a server, or from a script."""

from __future__ import annotations

import logging
import sys
import webbrowser
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from typing import Annotated, Any, TextIO, cast
from urllib.parse import urlencode

import anyio.to_thread
from cyclopts import Parameter
from decathlon_client import ClientError, Decathlon, NoVerdictError
from decathlon_client.client_values import server_url
from decathlon_client.local_server import EmbeddedEndpoint
from decathlon_client.process import shutdown_on_signal
from decathlon_client.script import ScriptError, play_script, read_script

from decathlon_mcp.app import bootstrap
from decathlon_mcp.cli.console import ScriptConsole, reporting_absence, server_answers
from decathlon_mcp.cli.options import ADDRESS, PLAY_DEFAULTS, PlaySettings, names_server, run_async
from decathlon_mcp.cli.output import print_json, this_command
from decathlon_mcp.cli.readiness import require_ready
from decathlon_mcp.cli.serve import ListenAddress, serve_at
from decathlon_mcp.cli.usage import report
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.hooks import plugins
from decathlon_mcp.http.application import Page
from decathlon_mcp.http.listening import listen
from decathlon_mcp.settings import Settings, all_settings
from decathlon_mcp.storage.lock import create_state_folder
from decathlon_mcp.telemetry.logs import configure_logging


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
    return run_async(play_task, None if names_server(url, settings) else settings, task, url, script)


LOG_FILE = "play.log"
"""Log of the server in this process, in the state folder."""


async def play_task(settings: Settings | None, task: str | None, url: str | None, script: str | None) -> int:
    """Play a task and return the exit status; with a script, 0 only on a pass.

    `settings`: for a server in this process; None to connect to the server at `url`, by default
    `DECATHLON_URL`. Raises DecathlonError if the task or the server is not available.
    """
    if script is None:
        path = "/play" + (f"?{urlencode({'task': task})}" if task else "")
        return await _open_page(url, path) if settings is None else await _serve_page(settings, task, path)
    if task is None:
        raise BadRequestError("a script plays one task: decathlon-mcp play TASK --script FILE")
    d = connect(settings, url)
    try:
        async with waiting_for_server(settings, url):
            return await _play_script(d, task, script)
    except ClientError as error:
        raise DecathlonError(error.message) from error


async def _open_page(url: str | None, path: str) -> int:
    """Open the page of a running server, which asks for its key or a token."""
    try:
        root = server_url(url, is_root=True).rstrip("/").removesuffix("/mcp")
    except ValueError as error:
        raise BadRequestError(str(error)) from None
    page = f"{root}{path}"
    sys.stdout.write(f"{page}\n")
    if not await server_answers(root):
        # A browser may reach it by a proxy that this program does not use.
        report(f"no server answers at {root}; `{this_command()} serve` starts one")
    await anyio.to_thread.run_sync(_open_browser, page)
    return 0


async def _serve_page(settings: Settings, task: str | None, path: str) -> int:
    """Serve the page of a server in this process until a signal; all attempts end with it."""
    if not any(plugin.page for plugin in plugins()):
        raise BadRequestError("this server has no page: play with --script FILE")
    address = ListenAddress("127.0.0.1", 0, None, (), (), None)

    def announce(url: str, page: Page | None) -> None:
        assert page is not None
        # The key gives access to everything in the state folder: a log must not have it.
        sys.stdout.write(f"{page.shown_address(url, to_person=sys.stdout.isatty(), path=path)}\n")
        sys.stdout.flush()
        sys.stderr.write("Ctrl-C ends the server, and the attempts that were not claimed\n")
        _open_browser(page.shown_address(url, to_person=True, path=path))

    with redirect_logs(settings):
        async with bootstrap(settings) as episodes:
            if task is not None:
                episodes.catalogue.find(task)
            sys.stderr.write(f"starting a server, whose log is {settings.state / LOG_FILE}\n")
            await require_ready(episodes, settings.max_sandboxes)
            with listen(address.host, address.port) as listener:
                await serve_at(listener, address, episodes, settings, announce)
    return 0


def _open_browser(address: str) -> None:
    """Open an address in a browser with a window; nothing happens if there is none."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    # A browser in this terminal, such as w3m, would take the terminal from the command.
    if type(browser) is not webbrowser.GenericBrowser:
        browser.open(address)


def connect(settings: Settings | None, url: str | None) -> Decathlon:
    """A client, as for `play`. Raises BadRequestError for a URL that cannot be right."""
    if settings is not None:
        options: dict[str, Any] = {name: getattr(settings, name) for name in all_settings().model_fields}
        return Decathlon.embedded(options.pop("suite"), options.pop("provider"), **options)
    try:
        return Decathlon(url)
    except ValueError as error:
        raise BadRequestError(str(error)) from None


def registry_of(d: Decathlon) -> EpisodeRegistry:
    """The server in this process of an open client of `connect`."""
    endpoint = d._server  # pyright: ignore[reportPrivateUsage]
    assert isinstance(endpoint, EmbeddedEndpoint)
    return endpoint.registry


@contextmanager
def redirect_logs(settings: Settings | None) -> Generator[None]:
    """Write the log of a server in this process to a file; without one, drop log records."""
    # A script prints its steps on stderr, so logs cannot go there.
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        with ExitStack() as stack:
            if settings is not None:
                create_state_folder(settings.state)
                log = stack.enter_context((settings.state / LOG_FILE).open("a", encoding="utf-8"))
                configure_logging(settings.log_level, settings.log_format)
                for handler in root.handlers:
                    cast("logging.StreamHandler[TextIO]", handler).setStream(log)
            else:
                root.handlers[:] = [logging.NullHandler()]
            yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@asynccontextmanager
async def waiting_for_server(settings: Settings | None, url: str | None) -> AsyncGenerator[None]:
    """Logs as of `redirect_logs`; a server that runs elsewhere and does not answer is reported."""
    with redirect_logs(settings):
        async with reporting_absence(url) if settings is None else nullcontext():
            yield


async def _play_script(d: Decathlon, task: str, file: str) -> int:
    """Play the script, printing its steps on stderr and the verdict as JSON on stdout."""
    steps = await read_script(file)
    console = ScriptConsole(stderr=True)
    async with shutdown_on_signal() as watcher:
        try:
            async with d, d.episode(task) as episode:
                console.line("episode", episode.address)
                await play_script(episode, steps, console)
                verdict = (await episode.evaluate()).raw
        except ScriptError as error:
            raise DecathlonError(str(error)) from None
        except NoVerdictError as error:
            if error.verdict:
                print_json(error.verdict)
            raise
        print_json(verdict)
        return 0 if verdict.get("success") is True else 1
    return watcher.status or 1
