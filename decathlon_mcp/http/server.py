"""Serving HTTP with uvicorn, with a shutdown that drains episodes first."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Generator
from typing import cast

import anyio
import anyio.to_thread
import uvicorn
from anyio.abc import TaskStatus
from starlette.types import ASGIApp

from decathlon_mcp.background import run_for_ever
from decathlon_mcp.events import Events
from decathlon_mcp.http.protocol import ConnectionLimits, Connections
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.edge")

GRACE_SECONDS = 5
"""How long open connections get to end, after the episodes are drained."""
SWITCH_SECONDS = 0.001
"""How long a thread may run Python code while another thread waits to."""
COLLECT_SECONDS = 30.0
"""Time between two collections of all garbage, which the thresholds make rare."""


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, and with a callback once it accepts connections."""

    def __init__(
        self, app: ASGIApp, connections: Connections, on_ready: Callable[[], None], *, lifespan: bool
    ) -> None:
        config = uvicorn.Config(
            app,
            # A function instead of a class, which uvicorn calls in the same way.
            http=cast("type[asyncio.Protocol]", connections.protocol),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on" if lifespan else "off",
            timeout_graceful_shutdown=GRACE_SECONDS,
            server_header=False,
        )
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        # At a signal uvicorn closes SSE streams at once, and calls in flight are lost. `serve_http` drains
        # first.
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn leaves the application's lifespan open then, which would end when the store has
            # been closed.
            with anyio.move_on_after(GRACE_SECONDS):
                await self.lifespan.shutdown()

    def stop_accepting(self) -> None:
        """Close the listening socket."""
        for listener in self.servers if self.started else ():
            listener.close()


def tune_interpreter() -> None:
    """Set the garbage collector and the threads of this process for a server that has started."""
    # Objects that exist now live as long as the server. Without scanning them again, and with rarer
    # collections, 1,024 sessions made 1,770 instead of 1,150 calls per second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    # Long replies are checked, and pages made, in threads. By default, one of them keeps the event loop
    # waiting for 5 ms.
    sys.setswitchinterval(SWITCH_SECONDS)


def _return_free_memory() -> None:
    """Give the heap's free pages back to the kernel, where the C library can do that (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def serve_http(
    app: ASGIApp,
    listener: socket.socket,
    *,
    drain: Callable[[], Awaitable[None]],
    hurry: Callable[[], None] = lambda: None,
    on_ready: Callable[[], None],
    stop: anyio.Event | None = None,
    limits: ConnectionLimits | None = None,
    events: Events | None = None,
    hand_over: bool = False,
) -> bool:
    """Serve until SIGTERM, SIGINT or `stop`; then drain, then close the connections that are still open.

    With `hand_over`, SIGTERM does neither: it ends accepting, and once the requests in progress are answered,
    after at most `GRACE_SECONDS`, this returns True. The application's lifespan is then still open, and the
    caller must end the process without unwinding it. Otherwise returns False.

    A second signal calls `hurry`, by which `drain` must end, and a third signal closes the connections at
    once. `limits`: by default, the limits of a server with default settings. `events`: where connections are
    counted.
    """
    connections = Connections(limits or ConnectionLimits(), events)
    stopped = stop or anyio.Event()
    handing_over = anyio.Event()

    def ready() -> None:
        tune_interpreter()
        on_ready()

    server = Server(app, connections, ready, lifespan=True)

    drained = anyio.Event()

    async def drain_and_stop() -> None:
        await stopped.wait()
        await drain()
        drained.set()
        server.should_exit = True

    async def stop_on_signal(*, task_status: TaskStatus[None]) -> None:
        is_hurried = False
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                log.info("stopping", extra=fields(signal=signal.Signals(number).name))
                if handing_over.is_set():
                    tasks.cancel_scope.cancel()
                elif is_hurried or drained.is_set():
                    server.should_exit = server.force_exit = True
                elif stopped.is_set():
                    is_hurried = True
                    hurry()
                elif hand_over and number == signal.SIGTERM:
                    handing_over.set()
                    tasks.start_soon(answer_and_leave)
                else:
                    stopped.set()

    async def answer_and_leave() -> None:
        server.stop_accepting()
        connections.close_idle()
        with anyio.move_on_after(GRACE_SECONDS):
            while connections.awaited:  # noqa: ASYNC110  (uvicorn's protocol has no event for it)
                await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()

    async def collect_garbage() -> None:
        # What an ended session leaves is in reference cycles. Without this, thousands of them accumulate.
        while True:
            await anyio.sleep(COLLECT_SECONDS)
            gc.collect()
            # Otherwise the heap keeps most of what the largest batch needed.
            await anyio.to_thread.run_sync(_return_free_memory)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_for_ever, collect_garbage)
        # An interrupt until here ends this; an interrupt in uvicorn's startup would be logged with a
        # traceback.
        await tasks.start(stop_on_signal)
        tasks.start_soon(drain_and_stop)
        tasks.start_soon(run_for_ever, connections.sweep)
        await server.serve(sockets=[listener])
        tasks.cancel_scope.cancel()
    return handing_over.is_set()
