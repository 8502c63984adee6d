"""The calls of one episode: sent to its sandbox, written to its trajectory, and given to those who wait."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial

from decathlon_mcp.driver_client.replies import CallParams, Reply
from decathlon_mcp.episodes.operations import CallTasks, Operations, Outcome, RunningCall
from decathlon_mcp.episodes.recording import CallRecorder, unanswered_call
from decathlon_mcp.episodes.tools import ToolRoute, ToolSession
from decathlon_mcp.errors import (
    DecathlonError,
    DriverError,
    EpisodeClaimedError,
    SandboxLostError,
)
from decathlon_mcp.storage.journal import Journal
from decathlon_mcp.storage.logged_calls import LoggedCalls
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.telemetry.metrics import CallOutcome, EpisodeMetrics

log = logging.getLogger("decathlon.episodes")


class EpisodeCalls:
    """Runs calls from their begin to their end. Whether a call may begin is decided by the episode.

    `label`: names the episode in the server's log. `on_full` is called when a call or its reply cannot be
    kept; it closes the attempt, and returns the error of a call that was not sent for that reason.
    """

    def __init__(
        self,
        journal: Journal,
        metrics: EpisodeMetrics,
        *,
        label: str,
        on_full: Callable[[], EpisodeClaimedError],
    ) -> None:
        self.recorder = CallRecorder(journal)
        self.operations = Operations()
        self.has_sent = False
        """Whether a call has been sent, by this server or by one that died."""
        self._metrics = metrics
        self._label = label
        self._on_full = on_full
        self._tasks: CallTasks | None = None

    @property
    def can_run(self) -> bool:
        """Whether calls that begin now are sent: inside of `running`."""
        return self._tasks is not None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Calls run in the body; those that still do at its end are cancelled."""
        self._tasks = tasks = CallTasks()
        try:
            yield
        finally:
            self._tasks = None
            for call in self.operations.running:
                if call.started:
                    call.end()
            await tasks.wait()

    def begin(
        self,
        session: ToolSession,
        route: ToolRoute,
        name: str,
        params: CallParams,
        *,
        digest: str,
        operation: str | None,
    ) -> RunningCall:
        """Begin a new call, without waiting if that is possible, else in a task."""
        self.recorder.last += 1
        call = RunningCall(
            seq=self.recorder.last,
            route=route,
            name=name,
            params=params,
            digest=digest,
            started_at=time.time(),
            operation=operation,
        )
        if self._tasks is None:
            call.finish()  # the runner is ending the episode
        else:
            self.operations.add(call)
            self._send(self._tasks, session, call)
        return call

    def restore(self, logged: LoggedCalls) -> None:
        """Continue those of a server that died."""
        self.has_sent = logged.calls > 0
        self.recorder.restore(logged)
        self.operations.restore(logged.operations, map(unanswered_call, logged.unanswered))

    @property
    def unanswered_requests(self) -> set[int]:
        """Ids of the driver's requests that `resume` will send again."""
        return {call.request for call in self.operations.running if call.request is not None}

    def resume(self, session: ToolSession | None) -> None:
        """Get the replies of the calls that the dead server had not: send them again under their old ids.

        The driver ignores those that it has had, and its replies come anyway. If no tool can be called any
        more, `session` is None, and the calls end with that reason instead.
        """
        for call in self.operations.running:
            if call.started:
                continue
            if call.request is None:
                self.operations.forget(call)
                self._end(call, DriverError("the server ended before it sent the call"))
            elif session is None:
                self._end(call, EpisodeClaimedError("this attempt was closed while the call ran"))
            else:
                assert self._tasks is not None, "no runner runs the episode"
                call.started = True
                self._tasks.start(partial(self._run, session, call))

    def end(self, error: DecathlonError) -> None:
        """The episode is over: end what still runs, and free the memory."""
        for call in self.operations.running:
            self._end(call, error)
        self.recorder.forget()
        self.operations = Operations()

    def _send(self, tasks: CallTasks, session: ToolSession, call: RunningCall) -> None:
        call.started = True
        try:
            request = session.begin(
                call.route,
                call.params,
                before_send=partial(self._before_send, call),
                on_change=partial(self._settle, session, call),
            )
        except DecathlonError as error:
            self._end_sent(call, error)
            return
        except Exception as error:  # noqa: BLE001
            self._end_sent(call, self._fault(error))
            return
        if request is None:
            tasks.start(partial(self._run, session, call))
        else:
            run = partial(self._run, session, call, begun=True)
            call.continue_in_task = partial(tasks.start, run)

    def _before_send(self, call: RunningCall, request: int) -> None:
        """Write a call that is about to be sent. Raises EpisodeClaimedError if it cannot be kept."""
        call.request = request
        if call.kept is None and not self.recorder.add_call(call):
            raise self._on_full()
        self.has_sent = True
        call.sent_at = time.perf_counter()

    def _on_reply(self, call: RunningCall, reply: Reply) -> None:
        call.outcome = reply
        self._add_reply(call, reply)

    def _settle(self, session: ToolSession, call: RunningCall) -> None:
        """There is a reply or something else for a call that has no task. Does not raise."""
        if call.continue_in_task is None:
            return  # it has one now
        assert call.request is not None
        outcome: Outcome | None = None
        try:
            if not session.settle(call.request, call.route, partial(self._on_reply, call)):
                call.run_in_task()
                return
            outcome = call.outcome
        except DecathlonError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001
            outcome = self._fault(error)
        call.continue_in_task = None
        self._end_sent(call, outcome)

    async def _run(self, session: ToolSession, call: RunningCall, *, begun: bool = False) -> None:
        """Run a call to its end. `begun`: it has been sent. Raises nothing but the runner's cancellation."""
        outcome: Outcome | None = None
        try:
            with call.scope:
                await session.call(
                    call.route,
                    call.params,
                    request_id=call.request,
                    before_send=partial(self._before_send, call),
                    on_reply=partial(self._on_reply, call),
                    on_progress=call.on_progress,
                    on_message=call.on_message,
                    begun=begun,
                )
            outcome = call.outcome
            if outcome is None and self._tasks is not None:  # cancelled
                outcome = DriverError("cancelled", reason="cancelled")
        except DecathlonError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001
            outcome = self._fault(error)
        finally:
            self._end_sent(call, outcome or call.outcome)

    def _fault(self, error: Exception) -> DecathlonError:
        log.error("a call failed", exc_info=error, extra=fields(episode=self._label))
        return DecathlonError(f"a fault of the server: {type(error).__name__}")

    def _end_sent(self, call: RunningCall, outcome: Outcome | None) -> None:
        """End a call with its reply or error; None if the episode ends before."""
        outcome = outcome or SandboxLostError("sandbox lost: the episode ended")
        if call.sent_at is not None:
            self._metrics.called(_metric_outcome(outcome), call.sent_at)
        self._end(call, outcome)

    def _end(self, call: RunningCall, outcome: Outcome) -> None:
        """Write an error that the trajectory does not have yet, and give the outcome to the callers."""
        if isinstance(outcome, DecathlonError):
            if call.kept is None:
                self.recorder.add_call(call)  # it failed before it could be sent
            if call.kept:
                self._add_reply(call, outcome)
        self.operations.finish(call, outcome)

    def _add_reply(self, call: RunningCall, outcome: Outcome) -> None:
        if not self.recorder.add_reply(call, outcome):
            self._on_full()


def _metric_outcome(outcome: Outcome) -> CallOutcome:
    if isinstance(outcome, DecathlonError):
        return "cancelled" if outcome.data.get("reason") == "cancelled" else "lost"
    return "error" if outcome.result is None or outcome.is_error else "ok"
