"""`serve` and `stdio`: the server over HTTP, or over this process's stdin and stdout."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from anyio import CancelScope
from decathlon_client.process import StdinPump, stop_on_signal

from decathlon_mcp import __version__
from decathlon_mcp.app import bootstrap
from decathlon_mcp.background import background_tasks, run_alone
from decathlon_mcp.cli import supervisor
from decathlon_mcp.cli.options import DEFAULT_HOST, DEFAULT_PORT
from decathlon_mcp.cli.readiness import require_ready
from decathlon_mcp.cli.usage import report
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import DecathlonError, SettingsError
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.http.listening import hosts_for, inherit_listener, listen
from decathlon_mcp.sandboxes.machine_limits import raise_descriptor_limit
from decathlon_mcp.settings import Settings
from decathlon_mcp.telemetry.logs import configure_logging, fields

if TYPE_CHECKING:
    from decathlon_mcp.http.application import Page

log = logging.getLogger("decathlon.cli")


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where the server listens, and by which names clients may reach it."""

    host: str
    port: int
    """0 picks a free port."""
    public_url: str | None
    """URL by which clients reach the server, if it differs from the listening address."""
    allowed_host: tuple[str, ...]
    """Host names that clients may use for the server."""
    allowed_origin: tuple[str, ...]
    """Origins of pages in browsers that may use the server."""
    ready_file: Path | None
    """File that gets the server's URL once the server is ready."""
    page: bool = True
    """Whether people can look at the episodes at this address."""

    def at_socket(self, listener: socket.socket) -> Self:
        """This address for a socket that systemd opened.

        Raises SettingsError if `host` or `port` is set to something else.
        """
        host, port = listener.getsockname()[:2]
        given_host = {"localhost": "127.0.0.1"}.get(self.host, self.host)
        if given_host not in (DEFAULT_HOST, host) or self.port not in (DEFAULT_PORT, port):
            raise SettingsError(
                f"--host {self.host} --port {self.port}: systemd opened a socket at {host}:{port}; "
                "leave --host and --port out"
            )
        return replace(self, host=host, port=port)

    def url(self, port: int) -> str:
        """Return the public URL if there is one, else the URL for clients on this machine."""
        if self.public_url:
            return self.public_url.rstrip("/")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def serve(settings: Settings, address: ListenAddress) -> int:
    """Serve over HTTP until SIGTERM or SIGINT.

    A hand-over ends the process: everything stays as after a kill, for the next server on the state folder.

    Raises SettingsError, SuiteError, ProviderUnavailableError.
    """
    configure_logging(settings.log_level, settings.log_format)
    supervised = supervisor.current()
    if supervised is not None and supervised.restarts:
        previous = fields(ended_by=supervised.cause, restarts=supervised.restarts)
        log.warning("started again", extra=previous)
    if settings.hand_over and not settings.survive_seconds:
        raise SettingsError("--hand-over requires --survive-seconds: with 0, sandboxes end with their server")
    raise_descriptor_limit()
    log.info("starting", extra=fields(step="reading the suites, looking for sandboxes of an earlier server"))
    async with (
        # Without survivors there is nothing that only one server may continue.
        bootstrap(
            settings, serves=settings.survive_seconds > 0, supervisor=supervised and supervised.parent
        ) as episodes,
        _leaving_episodes_on_failure(episodes),
        background_tasks() as tasks,
    ):
        if supervised is not None and supervised.restarts:
            # Clients wait, and the engine, which takes back all sandboxes now, would answer too late.
            look = partial(require_ready, episodes, settings.max_sandboxes, continues=True)
            tasks.start_soon(run_alone, look)
        else:
            log.info("starting", extra=fields(step="checking this machine and the programs in the sandboxes"))
            await require_ready(episodes, settings.max_sandboxes)
        with _listener(address) as (listener, address), _ready_file(address.ready_file) as write_url:

            def announce(url: str, page: Page | None) -> None:
                write_url(url)
                if supervised is not None:
                    ready_file = "" if address.ready_file is None else str(address.ready_file.absolute())
                    supervised.report_ready(listener, ready_file, settings.survive_seconds)
                log.info("listening", extra=fields(url=url, pid=os.getpid(), tasks=len(episodes.catalogue)))
                if settings.log_format == "text" and not (supervised and supervised.restarts):
                    place = None if page is None else page.shown_address(url, to_person=sys.stderr.isatty())
                    sys.stderr.write(_banner(episodes, url, place))
                    sys.stderr.flush()

            if await serve_at(listener, address, episodes, settings, announce):
                await episodes.shutdown.hand_over()
                if episodes.spans is not None:
                    await episodes.spans.end()
                _leave(address.ready_file)
    return 0


async def serve_at(
    listener: socket.socket,
    address: ListenAddress,
    episodes: EpisodeRegistry,
    settings: Settings,
    announce: Callable[[str, Page | None], None],
) -> bool:
    """Serve these episodes at a socket until SIGTERM or SIGINT; whether they are to be handed over.

    `announce` is called with the URL and the page once the server answers. Raises SettingsError.
    """
    # Imported late: it takes a second, and a missing engine is reported before that.
    from decathlon_mcp.http.application import http_app, page_for
    from decathlon_mcp.http.protocol import ConnectionLimits
    from decathlon_mcp.http.server import serve_http

    tokens = Tokens.read(settings.tokens)
    max_body_bytes = settings.max_body_mib << 20
    hosts = hosts_for(address.host, address.allowed_host, tokens, address.allowed_origin, address.public_url)
    page = page_for(episodes, settings.state, tokens, hosts, address.public_url) if address.page else None
    return await serve_http(
        http_app(
            episodes,
            tokens=tokens,
            hosts=hosts,
            public_url=address.public_url,
            max_body_bytes=max_body_bytes,
            page=page,
        ),
        listener,
        drain=episodes.shutdown.drain,
        hurry=episodes.shutdown.hurry,
        on_ready=lambda: announce(address.url(listener.getsockname()[1]), page),
        limits=ConnectionLimits.for_bodies(max_body_bytes, behind_proxy=address.public_url is not None),
        events=episodes.events,
        hand_over=settings.hand_over,
    )


@asynccontextmanager
async def _leaving_episodes_on_failure(episodes: EpisodeRegistry) -> AsyncGenerator[None]:
    """If the body fails while episodes run, end this process as a kill would: the next server has them."""
    # A fault must not cost more than a kill. Above all at the start: a slow engine, or a port that is in use,
    # would end every episode that was just taken back.
    try:
        yield
    except Exception as error:
        if episodes.store is None or not episodes.live:
            raise
        if isinstance(error, DecathlonError):
            report(error.message)
        else:
            log.exception("the server failed")
        log.warning("its episodes wait for the next server", extra=fields(episodes=len(episodes.live)))
        _exit(1)


@contextmanager
def _listener(address: ListenAddress) -> Generator[tuple[socket.socket, ListenAddress]]:
    """The listening socket, inherited or opened here, and its address. Raises SettingsError."""
    supervised = supervisor.current()
    inherited = _inherited_listener()
    if inherited is None:
        with listen(address.host, address.port) as listener:
            yield listener, address
        return
    with inherit_listener(inherited) as listener:
        # A socket of an earlier server's stays as it is, whatever the settings' file is now.
        activated = supervised is None or supervised.activated
        yield listener, address.at_socket(listener) if activated else address


def _inherited_listener() -> int | None:
    """Descriptor of a socket that listens already. Raises SettingsError if systemd passed several."""
    supervised = supervisor.current()
    if supervised is not None:
        return supervised.listener
    count = supervisor.activated_sockets()
    if count > 1:
        raise SettingsError(f"systemd passed {count} sockets: give the socket's unit one ListenStream=")
    return supervisor.FIRST_ACTIVATED if count else None


def _leave(ready_file: Path | None) -> NoReturn:
    """End this process without any clean-up."""
    if ready_file is not None:
        with suppress(OSError):
            ready_file.unlink(missing_ok=True)
    log.info("handed over")
    _exit(supervisor.HANDED_OVER_STATUS if supervisor.current() else 0)


def _exit(status: int) -> NoReturn:
    """End this process; of all clean-up, only the logs are flushed."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


async def stdio(settings: Settings, task: str | None, labels: Mapping[str, str]) -> int:
    """Serve over stdin and stdout until stdin ends or a signal stops this process.

    A second signal ends the process at once. `labels`: of each episode.
    """
    configure_logging(settings.log_level, settings.log_format)
    with _pumped_stdin() as (pump, stdin):
        async with bootstrap(settings) as episodes, background_tasks() as tasks:
            await require_ready(episodes, settings.max_sandboxes)
            # Imported late: a missing engine is reported before that.
            from decathlon_mcp.protocol.stdio import serve_stdio

            with CancelScope() as serving:
                tasks.start_soon(_end_at_signal, pump, serving)
                await serve_stdio(episodes, stdin, task=task, labels=labels)
    return 0


async def _end_at_signal(pump: StdinPump, serving: CancelScope) -> None:
    """End serving at the first signal that stops this process."""
    await stop_on_signal(pump)
    serving.cancel()


@contextmanager
def _pumped_stdin() -> Generator[tuple[StdinPump, socket.socket]]:
    """A socket with what comes over stdin, which no other program reads then."""
    # A thread that blocks in a read of stdin cannot be cancelled.
    pump_socket, stdin_socket = socket.socketpair()
    with stdin_socket, pump_socket:
        pump = StdinPump(os.dup(0), pump_socket)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        yield pump, stdin_socket


def _banner(episodes: EpisodeRegistry, url: str, page: str | None) -> str:
    catalogue = episodes.catalogue
    runnable = [name for name, suite, task in catalogue if catalogue.is_runnable(suite, task)]
    providers = {
        suite.name: episodes.factory(suite.name).provider.name for suite in episodes.catalogue.suites
    }
    suites = ", ".join(f"{suite} ({provider})" for suite, provider in providers.items())
    example = runnable[0] if runnable else "TASK"
    page_line = f"  the page    {page}\n" if page else ""
    return (
        f"\n  decathlon-mcp {__version__}\n\n"
        f"{page_line}"
        f"  the lobby   {url}/mcp\n"
        f"  a task      {url}/tasks/{example}/mcp\n"
        f"  tasks       {len(runnable)} of {len(episodes.catalogue)} can run here: {suites}\n"
        f"  stop        Ctrl-C\n\n"
    )


@contextmanager
def _ready_file(file: Path | None) -> Generator[Callable[[str], None]]:
    """Yield a function that writes the server's URL to the file; remove the file at the end.

    Raises SettingsError at once if the file cannot be written.
    """
    if file is None:
        yield lambda url: None
        return
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.unlink(missing_ok=True)
        partial.touch()
    except OSError as error:
        raise SettingsError(f"--ready-file: {file}: {error.strerror}") from None

    def write_url(url: str) -> None:
        partial.write_text(f"{url}\n", "utf-8")
        os.replace(partial, file)  # noqa: PTH105  (atomic, as its documentation says)

    try:
        yield write_url
    finally:
        partial.unlink(missing_ok=True)
        file.unlink(missing_ok=True)
