"""`serve`: the server over HTTP, and how it says that it is up."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from decathlon_mcp import __version__
from decathlon_mcp.app import bootstrap
from decathlon_mcp.cli.readiness import require_ready
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.settings import Settings
from decathlon_mcp.telemetry.logs import configure_logging, fields

log = logging.getLogger("decathlon.cli")


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where to listen, under which names, and who is told."""

    host: str
    port: int
    public_url: str | None
    allowed_host: tuple[str, ...]
    ready_file: Path | None

    def url(self, port: int) -> str:
        """Where a client on this machine, or one beyond, finds the server."""
        if self.public_url:
            return self.public_url.rstrip("/")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def serve(settings: Settings, doorway: ListenAddress) -> int:
    """Serve until SIGTERM or SIGINT. Raises SettingsError, SuiteError, ProviderUnavailableError."""
    configure_logging(settings.log_level, settings.log_format)
    async with bootstrap(settings) as episodes:
        await require_ready(episodes)
        # Only now: it takes a second to import, in which a missing engine can be told.
        from decathlon_mcp.http.application import http_app
        from decathlon_mcp.http.authentication import Tokens
        from decathlon_mcp.http.server import hosts_for, listen, serve_http

        tokens = Tokens.read(settings.tokens)
        hosts = hosts_for(doorway.host, doorway.allowed_host, tokens)
        app = http_app(episodes, tokens=tokens, hosts=hosts, public_url=doorway.public_url)
        with listen(doorway.host, doorway.port) as listener, _ready_file(doorway.ready_file) as tell:
            url = doorway.url(listener.getsockname()[1])

            def announce() -> None:
                tell(url)
                _announce(episodes, url, settings.log_format)

            await serve_http(app, listener, drain=episodes.drain, on_ready=announce)
    return 0


def _announce(episodes: EpisodeRegistry, url: str, log_format: str) -> None:
    log.info("listening", extra=fields(url=url, pid=os.getpid(), tasks=len(episodes.catalogue)))
    if log_format == "text":
        sys.stderr.write(_block(episodes, url))
        sys.stderr.flush()


def _block(episodes: EpisodeRegistry, url: str) -> str:
    """What a person wants to know of a server that is up."""
    runnable = [
        name for name, suite, task in episodes.catalogue if episodes.catalogue.is_runnable(suite, task)
    ]
    of = {
        suite.name: episodes.sandbox_factory(suite.name).provider.name for suite in episodes.catalogue.suites
    }
    suites = ", ".join(f"{suite} ({provider})" for suite, provider in of.items())
    example = runnable[0] if runnable else "TASK"
    return (
        f"\n  decathlon-mcp {__version__}\n\n"
        f"  the lobby   {url}/mcp\n"
        f"  a task      {url}/tasks/{example}/mcp\n"
        f"  tasks       {len(runnable)} of {len(episodes.catalogue)} can run here: {suites}\n"
        f"  end it      Ctrl-C\n\n"
    )


@contextmanager
def _ready_file(file: Path | None) -> Generator[Callable[[str], None]]:
    """A way to write the URL there, once; the file is there only while it is true.

    Raises SettingsError at once where it could not be written.
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

    def tell(url: str) -> None:
        partial.write_text(f"{url}\n", "utf-8")
        os.replace(partial, file)  # noqa: PTH105  (atomic, as its documentation says)

    try:
        yield tell
    finally:
        partial.unlink(missing_ok=True)
        file.unlink(missing_ok=True)
