"""`serve` and `stdio`: the server over HTTP, or over this process's stdin and stdout."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from decathlon_client.stdin import StdinPump, stop_on_signal

from decathlon_mcp import __version__
from decathlon_mcp.app import bootstrap
from decathlon_mcp.background import background_tasks
from decathlon_mcp.cli.doctor import require_ready
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.settings import Settings
from decathlon_mcp.telemetry.logs import configure_logging, fields

log = logging.getLogger("decathlon.cli")


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where the server listens, the names clients may call it by, and the file that gets its URL."""

    host: str
    port: int
    public_url: str | None
    allowed_host: tuple[str, ...]
    ready_file: Path | None

    def url(self, port: int) -> str:
        """Return the public URL if there is one, else the URL for clients on this machine."""
        if self.public_url:
            return self.public_url.rstrip("/")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def serve(settings: Settings, address: ListenAddress) -> int:
    """Serve over HTTP until SIGTERM or SIGINT.

    Raises SettingsError, SuiteError, ProviderUnavailableError.
    """
    configure_logging(settings.log_level, settings.log_format)
    async with bootstrap(settings) as episodes:
        await require_ready(episodes)
        # Imported late: it takes a second, and a missing engine is reported before that.
        from decathlon_mcp.http.application import http_app
        from decathlon_mcp.http.authentication import Tokens
        from decathlon_mcp.http.protocol import ConnectionLimits
        from decathlon_mcp.http.server import hosts_for, listen, serve_http

        tokens = Tokens.read(settings.tokens)
        hosts = hosts_for(address.host, address.allowed_host, tokens)
        max_body_bytes = settings.max_body_mib << 20
        app = http_app(
            episodes,
            tokens=tokens,
            hosts=hosts,
            public_url=address.public_url,
            max_body_bytes=max_body_bytes,
        )
        limits = ConnectionLimits.for_bodies(max_body_bytes, per_peer=settings.max_peer_connections)
        with listen(address.host, address.port) as listener, _ready_file(address.ready_file) as write_url:
            url = address.url(listener.getsockname()[1])

            def announce() -> None:
                write_url(url)
                _announce(episodes, url, settings.log_format)

            await serve_http(
                app,
                listener,
                drain=episodes.drain,
                on_ready=announce,
                limits=limits,
                metrics=episodes.metrics,
            )
    return 0


async def stdio(settings: Settings, task: str | None) -> int:
    """Serve over stdin and stdout until stdin ends or SIGTERM or SIGINT arrives.

    A second signal ends the process at once.
    """
    configure_logging(settings.log_level, settings.log_format)
    with _closable_stdin() as pump:
        async with bootstrap(settings) as episodes, background_tasks() as tasks:
            await require_ready(episodes)
            # Imported late: it takes a second, and a missing engine is reported before that.
            from decathlon_mcp.protocol.streams import serve_stdio

            tasks.start_soon(stop_on_signal, pump)
            await serve_stdio(episodes, task=task)
    return 0


@contextmanager
def _closable_stdin() -> Generator[StdinPump]:
    """Replace descriptor 0 by a socket whose end the returned object can close."""
    # `serve_stdio` reads stdin in a thread, and a thread that blocks in a read cannot be cancelled.
    pump_socket, stdin_socket = socket.socketpair()
    with stdin_socket, pump_socket:
        pump = StdinPump(os.dup(0), pump_socket)
        os.dup2(stdin_socket.fileno(), 0)
        yield pump


def _announce(episodes: EpisodeRegistry, url: str, log_format: str) -> None:
    log.info("listening", extra=fields(url=url, pid=os.getpid(), tasks=len(episodes.catalogue)))
    if log_format == "text":
        sys.stderr.write(_banner(episodes, url))
        sys.stderr.flush()


def _banner(episodes: EpisodeRegistry, url: str) -> str:
    catalogue = episodes.catalogue
    runnable = [name for name, suite, task in catalogue if catalogue.is_runnable(suite, task)]
    providers = {
        suite.name: episodes.sandbox_factory(suite.name).provider.name for suite in episodes.catalogue.suites
    }
    suites = ", ".join(f"{suite} ({provider})" for suite, provider in providers.items())
    example = runnable[0] if runnable else "TASK"
    return (
        f"\n  decathlon-mcp {__version__}\n\n"
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
