"""The tools of a ready episode: calls of them, and starts of their servers, at a first call or ahead.

A server that fails to start is started once more. If it fails again, the episode cannot go on: `failed` is
set, for the runner. The server of the suite's local tools is an exception, because it is no server of the
task: its failures are errors of the calls, and the next call starts it again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio

from decathlon_mcp.background import Flag
from decathlon_mcp.driver.client import DriverClient, ServerInfo
from decathlon_mcp.driver.replies import CallParams, Truncation
from decathlon_mcp.episodes.extensions import CallFilter
from decathlon_mcp.episodes.tools.offered import ToolRoute
from decathlon_mcp.errors import (
    AtCapacityError,
    CallTimeoutError,
    DriverError,
    LimitExceededError,
    SandboxLostError,
)
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import as_object

MAX_ATTEMPTS = 2
OUTPUT_TAIL = 2000
"""Characters of a server's stderr that an error message quotes."""
log = logging.getLogger("decathlon.episodes")
Report: TypeAlias = Callable[[str, ServerInfo | None], Awaitable[None]]
"""Called with the name of a server that has started, and its tools. None: they exceed the limits, or it does
not start at all."""


@dataclass(slots=True)
class _Server:
    """State of one server. `attempts`: failed starts. `lock`: for starting it."""

    is_running: bool = False
    attempts: int = 0
    failure: DriverError | None = None
    lock: anyio.Lock = field(default_factory=anyio.Lock)


class ServerStarts:
    """Starts the defined servers of one episode; each has `start_seconds`.

    `running`: names of servers that are known to run. Servers that an earlier server process has started may
    run too. `optional`: names of servers whose end or failed start is only an error of the call; the next
    call starts them again. `turn`: entered while a server starts; it may raise AtCapacityError.
    """

    def __init__(
        self,
        driver: DriverClient,
        *,
        start_seconds: float,
        running: Collection[str] = (),
        optional: Collection[str] = (),
        report: Report | None = None,
        turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self.failed = Flag()
        self.failure: DriverError | None = None
        """Why `failed` is set."""
        self.optional = frozenset(optional)
        self._driver = driver
        self._start_seconds = start_seconds
        self._report_outcome = report
        self._turn = turn
        self._servers = {name: _Server(is_running=True) for name in running}

    def is_running(self, name: str) -> bool:
        """Whether a server is known to run."""
        return name in self._servers and self._servers[name].is_running

    def note_failure(self, name: str, error: DriverError) -> None:
        """A call of this server has failed."""
        if name in self.optional and error.data.get("reason") == "server":
            # It may have died: the next call starts it, unless it still runs.
            self._servers.setdefault(name, _Server()).is_running = False

    async def start_ahead(
        self,
        names: Collection[str],
        idle: Callable[[], Awaitable[None]],
        *limiters: anyio.CapacityLimiter,
    ) -> None:
        """Start servers one after the other, each once `idle` has returned and with a place of each limiter.

        `idle`: waits until no tool is called. A server that fails is left to its first call.
        """
        for name in names:
            async with AsyncExitStack() as places:
                for limiter in limiters:
                    await places.enter_async_context(limiter)
                await idle()
                try:
                    await self.ensure(name, ahead=True)
                except DriverError as error:
                    log.warning("a server could not be started ahead", extra=fields(why=error.message))
                except (AtCapacityError, CallTimeoutError, SandboxLostError):
                    return

    async def ensure(self, name: str, *, ahead: bool = False) -> None:
        """Start a server unless it runs. `ahead`: no call waits for it, and a failure does not set `failed`.

        Raises DriverError, AtCapacityError, and SandboxLostError if `failed` is set.
        """
        server = self._servers.setdefault(name, _Server())
        if server.is_running:
            return
        failure = server.failure
        async with server.lock:
            if server.is_running:
                return
            self._raise_failure()
            if name in self.optional and server.failure not in (None, failure):
                # Calls that waited for an attempt share its failure: one after another they would wait long.
                raise DriverError(server.failure.message, **server.failure.data)
            async with self._turn():
                # Shielded: a caller that is cancelled must not stop a server for which others wait. The end
                # of the sandbox ends the start. A start ahead ends with the attempt, before the sandbox.
                with anyio.CancelScope(shield=not ahead):
                    while not server.is_running:
                        await self._start(name, server, ahead=ahead)

    async def _start(self, name: str, server: _Server, *, ahead: bool) -> None:
        """Start a server once. Raises as `ensure`, unless it may be tried again at once."""
        info: ServerInfo | None = None
        try:
            started = await self._driver.start(
                [name], deadline_seconds=self._start_seconds, again=name in self.optional
            )
            server.is_running = True
            if name not in started:
                return
            info = started[name]
        except LimitExceededError:
            server.is_running = True
        except DriverError as error:
            about = as_object(error.data.get("about")) or {}
            if about.get("ended") is True:
                # An earlier server process has started it; for a call it is a server that died.
                server.is_running = True
                raise
            server.attempts += 1
            server.failure = error
            if name in self.optional or error.data.get("reason") == "frozen":
                raise
            log.warning("a server did not start", extra=fields(server=name, why=error.message))
            if ahead:
                raise
            if server.attempts < MAX_ATTEMPTS:
                return
            stderr = str(about.get("stderr", "")).strip()[-OUTPUT_TAIL:]
            message = f"{error.message}{f'; stderr: {stderr}' if stderr else ''}"
            self.failure = DriverError(message, **error.data)
            self.failed.set()
        if self._report_outcome is not None and name not in self.optional:
            await self._report_outcome(name, info)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise SandboxLostError(f"sandbox lost: {self.failure.message}")


@dataclass(frozen=True, slots=True)
class ToolSession:
    """The tools of one ready episode and the driver that calls them."""

    driver: DriverClient
    starts: ServerStarts
    """Starts the servers that do not run yet."""
    truncation: Truncation | None = None
    """How overlong replies are shortened, except for the suite's local tools; None: they are not."""
    call_filter: CallFilter | None = None
    """Changes the arguments of their tools. The suite's local tools are called as they are."""

    def truncation_for(self, route: ToolRoute) -> Truncation | None:
        """How overlong replies of a tool are shortened."""
        return None if route.server in self.starts.optional else self.truncation

    def filters(self, route: ToolRoute) -> bool:
        """Whether a tool gets what `filtered` returns."""
        return self.call_filter is not None and route.server not in self.starts.optional

    async def filtered(self, route: ToolRoute, params: CallParams) -> CallParams:
        """The parameters of a call with the arguments that the call filter makes of them."""
        if self.call_filter is None or params.arguments is None or not self.filters(route):
            return params
        return CallParams(await self.call_filter(params.arguments, route.schema), params.meta)
