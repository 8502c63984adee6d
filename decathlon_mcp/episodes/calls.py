"""The calls of one episode: written to its trajectory, sent to its sandbox, and given to those who wait.

A call needs no task of its own. Where its reply is read, it is written to the trajectory and ends the call. A
task is started for a call that has to wait before it is sent.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from anyio.abc import TaskGroup

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver_client.replies import CallParams
from decathlon_mcp.episodes.operations import CallState, Operations, Outcome, RunningCall
from decathlon_mcp.episodes.recording import CallRecorder, unanswered_call
from decathlon_mcp.episodes.tools import ToolRoute, ToolSession
from decathlon_mcp.errors import (
    DecathlonError,
    DriverError,
    EpisodeClaimedError,
    SandboxLostError,
)
from decathlon_mcp.storage.journal import Journal
from decathlon_mcp.storage.logged_calls import LoggedCalls, Origin
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.telemetry.metrics import CallOutcome, EpisodeMetrics

log = logging.getLogger("decathlon.episodes")

ANSWER_SECONDS = 300.0
"""How long the replies of an episode that has ended can still be had: as long as `decathlon_client` tries."""
CANCELLED = "cancelled"


class EpisodeCalls:
    """Runs calls from their begin to their end. Whether a call may be sent is decided by the episode.

    `label`: names the episode in the server's log. `require_open` raises the error of a call that may not be
    sent. `find_route`: the route of a tool; it raises UnknownToolError. `on_full` is called when a call or
    its reply cannot be kept; it closes the attempt, and returns the error of a call that was not sent for
    that reason.
    """

    def __init__(
        self,
        journal: Journal,
        metrics: EpisodeMetrics,
        *,
        label: str,
        require_open: Callable[[], None],
        find_route: Callable[[str], ToolRoute],
        on_full: Callable[[], EpisodeClaimedError],
    ) -> None:
        self.recorder = CallRecorder(journal)
        self.operations = Operations()
        self._metrics = metrics
        self._label = label
        self._require_open = require_open
        self._find_route = find_route
        self._on_full = on_full
        self._tasks: TaskGroup | None = None
        self._session: ToolSession | None = None
        """The tools, once they can be called."""
        self._ended_at = math.inf

    @property
    def has_sent(self) -> bool:
        """Whether a call has been sent, by this server or by one that died."""
        return self.recorder.sent > 0

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Calls can be sent in the body; those that run at its end are ended."""
        async with background_tasks() as self._tasks:
            try:
                yield
            finally:
                self._tasks = None
                for call in self.operations.running:
                    if call.state is not CallState.RESTORED:
                        self._end(call, _episode_ended())

    def accept(self, name: str, params: CallParams, origin: Origin, digest: str) -> RunningCall:
        """Accept a new call: its line is in the trajectory, and it runs whatever becomes of its client.

        If the tools cannot be called yet, `open` sends it. Raises what `require_open`, `find_route` and
        `on_full` raise; then nothing has happened.
        """
        session, route = self._session, None
        if session is not None:
            route = self._find_route(name)
            self._require_open()
        call = RunningCall(
            seq=self.recorder.last + 1,
            name=name,
            params=params,
            digest=digest,
            started_at=time.time(),
            origin=origin,
            cancel=self._cancel,
        )
        self.operations.add(call)
        try:
            if session is not None and route is not None and session.starts.is_running(route.server):
                self._send(session, call, route)
            else:
                self._keep_waiting(session, call)
        except BaseException:
            self.operations.forget(call)
            raise
        self.recorder.last = call.seq
        return call

    def restore(self, logged: LoggedCalls) -> None:
        """Continue those of a server that died."""
        self.recorder.restore(logged)
        calls = [unanswered_call(line) for line in logged.unanswered]
        for call in calls:
            call.cancel = self._cancel
        self.operations.restore(logged.operations, calls)

    @property
    def unanswered_requests(self) -> set[int]:
        """Ids of the driver's requests that `open` will send again."""
        return {
            call.request
            for call in self.operations.running
            if call.state is CallState.RESTORED and call.request is not None
        }

    def open(self, session: ToolSession) -> None:
        """The tools can be called: send what was accepted before, and get the replies that a dead server had
        not. Its calls are sent again under their old ids.

        The driver ignores those that it has had, and its replies come anyway.
        """
        self._session = session
        for call in self.operations.running:
            if call.state is CallState.RESTORED and call.route is not None:
                # Its server runs, or it has its reply already.
                self._send(session, call, call.route)
            elif call.state is CallState.WAITING:
                self._start(call, self._start_server_and_send(session, call))

    def end(self, error: DecathlonError) -> None:
        """The attempt is over: end what still runs."""
        for call in self.operations.running:
            self._end(call, error)

    def end_for_good(self, error: DecathlonError) -> None:
        """The episode is over."""
        self.end(error)
        self._ended_at = time.monotonic()

    def forget_old(self) -> None:
        """Free the memory of an episode that is over, once nobody asks for a reply any more."""
        if time.monotonic() > self._ended_at + ANSWER_SECONDS:
            self.recorder.forget()
            self.operations = Operations()

    # from the acceptance to the driver

    def _keep_waiting(self, session: ToolSession | None, call: RunningCall) -> None:
        """Write the line of a call that has to wait. `session`: None before the tools can be called."""
        if not self.recorder.add_accepted(call):
            raise self._on_full()
        if session is not None:
            self._start(call, self._start_server_and_send(session, call))

    def _start(self, call: RunningCall, work: Coroutine[Any, Any, None]) -> None:
        """Have a task bring a call on its way. If that fails, the call ends with the error."""

        async def run() -> None:
            try:
                await work
            except DecathlonError as error:
                self._end(call, error)
            except Exception as error:
                log.exception("a call failed", extra=fields(episode=self._label))
                self._end(call, DecathlonError(f"a fault of the server: {type(error).__name__}"))

        if self._tasks is not None:
            self._tasks.start_soon(run)
        else:
            work.close()
            self._end(call, _episode_ended())

    async def _start_server_and_send(self, session: ToolSession, call: RunningCall) -> None:
        route = self._find_route(call.name)
        await session.starts.ensure(route.server)
        if not call.is_ended:
            # The attempt may have been closed meanwhile.
            self._require_open()
            self._send(session, call, route)

    def _send(self, session: ToolSession, call: RunningCall, route: ToolRoute) -> None:
        """Write a call's line, and send it to its server, which runs. Raises what `on_full` returns."""
        if call.request is None:
            request = session.driver.new_request_id()
            if not self.recorder.add_call(call, route, request):
                raise self._on_full()
            call.request = request
        call.state, call.route, call.sent_at = CallState.SENT, route, time.perf_counter()
        session.starts.begin_call()
        sending = session.request(
            route,
            call.params,
            call.request,
            on_outcome=partial(self._on_outcome, session, call),
            on_notification=call.on_notification,
        )
        if not session.driver.send_now(sending):
            self._start(call, session.driver.send(sending))

    # from the driver to those who wait

    def _on_outcome(self, session: ToolSession, call: RunningCall, outcome: Outcome | None) -> None:
        """A call has its reply, or an error; None if the connection to the driver has ended."""
        if outcome is None:
            self._start(call, self._end_lost(session, call))
        else:
            self._end(call, outcome)

    async def _end_lost(self, session: ToolSession, call: RunningCall) -> None:
        self._end(call, await session.driver.closed_error())

    def _cancel(self, call: RunningCall) -> None:
        if call.state is CallState.SENT and call.request is not None and self._session is not None:
            self._session.driver.cancel(call.request)
        self._end(call, DriverError(CANCELLED, reason=CANCELLED))

    def _end(self, call: RunningCall, outcome: Outcome) -> None:
        """Write a call's outcome, and give it to those who wait. No effect on one that has ended."""
        if call.is_ended:
            return
        if call.sent_at is not None and call.route is not None and self._session is not None:
            self._metrics.called(_metric_outcome(outcome), call.sent_at)
            failure = outcome if isinstance(outcome, DriverError) else None
            self._session.starts.end_call(call.route.server, failure)
        if not self.recorder.add_reply(call, outcome):
            self._on_full()
        self.operations.end(call, outcome)


def _episode_ended() -> SandboxLostError:
    return SandboxLostError("sandbox lost: the episode ended")


def _metric_outcome(outcome: Outcome) -> CallOutcome:
    if isinstance(outcome, DecathlonError):
        return "cancelled" if outcome.data.get("reason") == CANCELLED else "lost"
    return "error" if outcome.result is None or outcome.is_error else "ok"
