"""Serving HTTP until told to stop: uvicorn, with our own way of ending."""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Generator

import anyio
import uvicorn
from starlette.applications import Starlette

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.http.application import Hosts
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.edge")

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
GRACE_SECONDS = 5


class _Server(uvicorn.Server):
    """uvicorn, but for how it learns that it should end and whom it tells that it is up."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Ours: uvicorn would cut streams at once, with calls in flight."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # What is there now lives as long as the server: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        self._on_ready()


def hosts_for(host: str, more: tuple[str, ...], tokens: Tokens) -> Hosts:
    """Which names are answered to. Raises SettingsError for an open door: beyond loopback, without tokens."""
    if host not in LOOPBACK and not tokens:
        raise SettingsError(
            f"--host {host} can be reached from other machines, and there are no tokens: give --tokens FILE "
            "(`decathlon-mcp token NAME` makes a line for it), or stay on 127.0.0.1"
        )
    own = () if host in ("0.0.0.0", "::") else (f"[{host}]" if ":" in host else host,)
    return Hosts(tuple(dict.fromkeys((*Hosts().names, *own, *more))))


def raise_file_limit() -> None:
    """As many open files as this user may have: an episode has a line, a journal, its clients' sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises SettingsError where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
        ) from None
    return listener


async def serve_http(
    app: Starlette,
    listener: socket.socket,
    *,
    drain: Callable[[], Awaitable[None]],
    on_ready: Callable[[], None],
    stop: anyio.Event | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`: then drain, then close open streams.

    A second signal ends the wait.
    """
    raise_file_limit()
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=75,
        server_header=False,
    )
    server = _Server(config, on_ready)
    stopped = stop or anyio.Event()

    async def drain_and_stop() -> None:
        await stopped.wait()
        await drain()
        server.should_exit = True

    async def stop_on_signal() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("stopping", extra=fields(signal=signal.Signals(number).name))
                if stopped.is_set():
                    server.should_exit = server.force_exit = True
                stopped.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_on_signal)
        tasks.start_soon(drain_and_stop)
        await server.serve(sockets=[listener])
        tasks.cancel_scope.cancel()
