"""The calls of one episode: written to its trajectory, sent to its sandbox, and given to those who wait.

A call needs no task of its own. Where its reply is read, it is written to the trajectory and ends the call. A
task is started for a call that has to wait before it is sent.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from decathlon_mcp.background import Flag, background_tasks
from decathlon_mcp.driver.replies import CallParams, Reply
from decathlon_mcp.episodes.call_recorder import CallRecorder, unanswered_call
from decathlon_mcp.episodes.operations import (
    CallState,
    Operations,
    Outcome,
    RunningCall,
    Waiter,
    call_digest_of_any_size,
)
from decathlon_mcp.episodes.state import NOT_READY, Phase, State
from decathlon_mcp.episodes.tools.offered import EpisodeTools, ToolRoute
from decathlon_mcp.episodes.tools.session import ToolSession
from decathlon_mcp.errors import (
    DecathlonError,
    DiskFullError,
    DriverError,
    EpisodeClaimedError,
    LimitExceededError,
    SandboxLostError,
    UnknownToolError,
)
from decathlon_mcp.grading.attempt import TruncationCause
from decathlon_mcp.storage.logged_calls import RequestKeys
from decathlon_mcp.storage.trajectory import Trajectory
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.telemetry.metrics import CallOutcome, EpisodeMetrics
from decathlon_mcp.types import JsonObject

log = logging.getLogger("decathlon.episodes")

LOST_SECONDS = 5.0
"""How long a call whose sandbox was lost waits for the runner to record why."""
ANSWER_SECONDS = 300.0
"""How long the replies of an episode that has ended can still be had: as long as `decathlon_client` tries."""
CANCELLED = "cancelled"
UNWRITTEN_SECONDS = 1.0
"""Time between two tries to write the line of a call that the disk refuses. The call waits."""


class EpisodeCalls:
    """Accepts an episode's calls and runs them to their end.

    `public_id`: names the episode in the server's log. `tools`: the tools that it lists. `max_calls`: how
    many may be sent. `close` closes the attempt for a limit that was reached, and returns whether it will be
    graded. `first`: the highest number that is kept for calls of `replay`.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        metrics: EpisodeMetrics,
        *,
        public_id: str,
        state: State,
        tools: EpisodeTools,
        max_calls: int | None,
        close: Callable[[TruncationCause], bool],
        first: int = 0,
    ) -> None:
        self.recorder = CallRecorder(trajectory, first)
        self._first = first
        self._trajectory = trajectory
        self._metrics = metrics
        self._public_id = public_id
        self._state = state
        self._tools = tools
        self._max_calls = max_calls
        self._close = close
        self._operations = Operations()
        self._tasks: TaskGroup | None = None
        self._session: ToolSession | None = None
        """What calls the tools, once they can be called, or a call of another episode is played again."""
        self._is_open = False
        """Whether clients' calls are sent; before they wait."""
        self._unwritten_at = -math.inf
        self._log_is_full = ""
        """The error of further calls once one could not be written."""
        self._ended_at = math.inf
        self.on_still: Callable[[], None] | None = None
        """Called when the last call that runs has ended, unless calls are held."""
        self._holds = self._held_at = 0
        self._held: list[RunningCall] = []
        self._changed = anyio.Event()
        self._known = Flag()
        """Set unless the calls of a server that died are still to be read."""
        self._known.set()

    @property
    def sent(self) -> int:
        """Number of calls that were sent so far, by this server or by one that died."""
        return self._trajectory.index.sent

    @property
    def unanswered(self) -> tuple[RunningCall, ...]:
        """The calls without a reply so far."""
        return self._operations.running

    @property
    def answered(self) -> int:
        """Number of those that have their reply."""
        return self._trajectory.index.answered

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Calls can be sent in the body; those that run at its end are ended."""
        async with background_tasks() as self._tasks:
            try:
                yield
            finally:
                self._tasks = None
                for call in self._operations.running:
                    if call.state is not CallState.RESTORED:
                        self._end(call, _episode_ended())

    async def accept(
        self, name: str, params: CallParams, keys: RequestKeys, waiter: Waiter | None = None
    ) -> RunningCall | int:
        """Accept a call of one of the task's tools; returns its handle for `reply_of`.

        The call is in the trajectory then, and runs whatever becomes of its client; before the episode is
        ready, it waits. If the request repeats an earlier call (see `operations`), that one is returned, and
        nothing runs. `waiter`: the request, which ends with `response_over`. Raises UnknownToolError,
        EpisodeClaimedError, EpisodeEndedError, the cause of a failed set-up, and BadRequestError for
        arguments that are no JSON object, or an operation that was another call.
        """
        digest = await call_digest_of_any_size(name, params.arguments)
        await self._known.wait()
        call = await self._operations.find(keys, digest)
        if call is None:
            call = self._begin(name, params.on_one_line(), keys, digest)
        elif isinstance(call, RunningCall) and self._operations.remember_all(call, keys):
            self.recorder.add_joined(call, keys)
        self._attach(call, waiter, digest)
        return call

    async def find(self, keys: RequestKeys, waiter: Waiter | None = None) -> RunningCall | int | None:
        """The call of a request that has come before, for `reply_of`; None if it was not accepted."""
        await self._known.wait()
        call = self._operations.known(keys)
        self._attach(call, waiter, "")
        return call

    @staticmethod
    def _attach(call: RunningCall | int | None, waiter: Waiter | None, digest: str) -> None:
        if waiter is not None:
            waiter.digest = digest
            if isinstance(call, RunningCall) and not call.is_ended:
                call.add(waiter)

    def response_over(self, call: RunningCall | int, waiter: Waiter, *, handed_over: bool) -> None:
        """The response to a request is over. `handed_over`: the transport took all of it."""
        self._operations.response_over(call, waiter, handed_over=handed_over)

    async def reply_of(self, call: RunningCall | int, waiter: Waiter) -> Reply:
        """Wait for the reply of a call that was accepted.

        Raises the error that it failed with: CallTimeoutError, DriverError, LimitExceededError,
        SandboxLostError, EpisodeClaimedError, EpisodeEndedError, UnknownToolError. Raises
        ProviderUnavailableError while the sandbox cannot be reached; the call goes on, for a request that
        comes back.
        """
        if not isinstance(call, RunningCall):
            return await self._first_reply(call)
        outcome = await call.wait(waiter)
        if isinstance(outcome, DecathlonError):
            # A copy: each request adds its frames to the error that it raises.
            raise await self._explain(type(outcome)(outcome.message, **outcome.data))
        return outcome

    async def call(self, name: str, params: CallParams, *, waiter: Waiter | None = None) -> Reply:
        """Call a tool of the task and return its server's reply. Raises what the two halves raise."""
        waiter = waiter or Waiter()
        call = await self.accept(name, params, waiter.keys, waiter)
        try:
            return await self.reply_of(call, waiter)
        finally:
            self.response_over(call, waiter, handed_over=True)

    async def replay(self, session: ToolSession, seq: int, name: str, params: CallParams) -> Outcome:
        """Make a call of another episode again under its number, before the tools can be called.

        Returns when it has ended. Raises UnknownToolError, and EpisodeClaimedError if the log is full.
        """
        digest = await call_digest_of_any_size(name, params.arguments)
        self._use(session)
        self._tools.route(name)
        call = self._begin(name, params.on_one_line(), RequestKeys(), digest, replayed=seq)
        return await call.wait(Waiter())

    def copy(self, call: JsonObject, reply: JsonObject) -> None:
        """Write a call of another episode, of whose state this one is a copy, from its two lines.

        Raises EpisodeClaimedError if the log is full.
        """
        if not self.recorder.copy(call, reply):
            raise self._close_full()

    # a moment at which none runs

    def hold(self) -> int:
        """Let calls that come from now on wait until `release`; returns the number of the last one before."""
        if self._holds == 0:
            self._held_at = self.recorder.last
        self._holds += 1
        return self._held_at

    def release(self) -> None:
        """Let calls run again, if nobody else holds them."""
        self._holds -= 1
        if self._holds == 0:
            held, self._held = self._held, []
            for call in held:
                if self._session is not None and not call.is_ended:
                    self._start(call, partial(self._start_server_and_send, self._session, call))

    @asynccontextmanager
    async def held(self, seconds: float) -> AsyncGenerator[int | None]:
        """Hold calls in the body, and wait for the end of those that run.

        Yields the number of the last one, or None if one has run for longer than `seconds`.
        """
        last = self.hold()
        try:
            with anyio.move_on_after(seconds):
                while not self._is_still:
                    self._changed = anyio.Event()
                    await self._changed.wait()
            yield last if self._is_still else None
        finally:
            self.release()

    @property
    def _is_still(self) -> bool:
        """Whether no call runs; those that are held have not begun."""
        return all(call in self._held for call in self._operations.running)

    def cancel(self, operation: str) -> None:
        """Cancel the call of an operation whose client will not come back; no effect if none is running."""
        self._operations.abandon(operation)

    def expect(self) -> None:
        """Let requests wait for `restore`, which must be called: they may repeat a call of a server that
        died.
        """
        self._known = Flag()

    async def restore(self, *, starts_over: bool = False) -> None:
        """Read the calls of a server that died from the trajectory, before the episode is READY again.

        Those of `replay` are removed there if the episode was not READY: its set-up starts over.
        """
        logged = await anyio.to_thread.run_sync(self._trajectory.read_calls)
        if starts_over and self._first:
            await anyio.to_thread.run_sync(self._trajectory.remove_calls, self._first)
            logged = await anyio.to_thread.run_sync(self._trajectory.read_calls)
        calls = [unanswered_call(line) for line in logged.unanswered]
        for call in calls:
            call.cancel = self._cancel
        self._operations.restore(logged.keys, calls)
        self._known.set()

    def require_whole_record(self, claimed: int = 0) -> None:
        """Raise SandboxLostError if the trajectory is gone or lacks calls: evaluators must not judge it.

        `claimed`: how many calls had been sent before the claim.
        """
        damage = self._trajectory.why_unreadable()
        if self.sent < claimed:
            damage = f"{claimed - self.sent} of {claimed} calls are missing in it"
        if damage is not None:
            raise SandboxLostError(f"the episode's record, its trajectory, is damaged: {damage}")

    @property
    def unanswered_requests(self) -> set[int]:
        """Ids of the driver's requests that `open` will send again."""
        return {
            call.request
            for call in self._operations.running
            if call.state is CallState.RESTORED and call.request is not None
        }

    def open(self, session: ToolSession) -> None:
        """The tools can be called: send what was accepted before, and get the replies that a dead server had
        not. Its calls are sent again under their old ids.

        The driver ignores those that it has had, and its replies come anyway.
        """
        self._use(session)
        self._is_open = True
        for call in self._operations.running:
            if call.state is CallState.RESTORED and call.route is not None:
                # Its server runs, or it has its reply already.
                if session.coerces(call.route):
                    self._start(call, partial(self._send_coerced, session, call))
                else:
                    self._send(session, call, call.route)
            elif call.state is CallState.WAITING:
                self._start(call, partial(self._start_server_and_send, session, call))

    def _use(self, session: ToolSession) -> None:
        if self._session is not session:
            self._session = session
            session.driver.on_absent(self._on_absent)

    def close(self) -> None:
        """End what a dead server has left of an attempt that is closed: no tool can be called any more."""
        self._end_all(EpisodeClaimedError("this attempt was closed while the call ran"))

    def end(self, error: DecathlonError) -> None:
        """The episode is over: end what still runs."""
        self._end_all(error)
        self._known.set()
        self._session = None
        self._ended_at = time.monotonic()

    def _end_all(self, error: DecathlonError) -> None:
        for call in self._operations.running:
            self._end(call, error)

    def forget_old(self) -> None:
        """Free the memory of an episode that is over, once nobody asks for a reply any more."""
        if time.monotonic() > self._ended_at + ANSWER_SECONDS:
            self._trajectory.forget()
            self._operations = Operations()

    # from the acceptance to the driver

    def _begin(
        self, name: str, params: CallParams, keys: RequestKeys, digest: str, *, replayed: int | None = None
    ) -> RunningCall:
        """Begin a new call; if this raises, nothing has happened. `replayed`: its number, see `replay`."""
        route = None if self._tools.offered is None else self._tools.route(name)
        if self._state.phase not in NOT_READY:
            self._require_open()
        is_open = self._is_open and not self._holds
        session = self._session if is_open or replayed is not None else None
        call = RunningCall(
            seq=self.recorder.last + 1 if replayed is None else replayed,
            name=name,
            params=params,
            digest=digest,
            started_at=time.time(),
            keys=keys,
            cancel=self._cancel,
            replayed=replayed is not None,
        )
        self._operations.add(call)
        try:
            if (
                session is not None
                and route is not None
                and session.starts.is_running(route.server)
                and not session.coerces(route)
            ):
                self._send(session, call, route)
            else:
                self._keep_waiting(session, call)
        except BaseException as error:
            self._operations.forget(call)
            if isinstance(error, DiskFullError):
                advice = "the call was not sent, and the attempt goes on: send it again later"
                raise DiskFullError(f"{error.message}; {advice}", **error.data) from None
            raise
        if self._holds:
            self._held.append(call)
        return call

    def _require_open(self) -> None:
        """Raise the reason why no call may be sent; reaching the limit of calls closes the attempt."""
        if self._state.phase is Phase.ENDED:
            raise self._state.end_error()
        if self._state.phase is not Phase.READY:
            if self._log_is_full:
                raise EpisodeClaimedError(self._log_is_full, truncated=True)
            raise EpisodeClaimedError("this attempt was claimed and is closed: no tool works any more")
        if self._max_calls is not None and self.sent >= self._max_calls:
            consequence = "will be graded as it is" if self._close("calls") else "counts as failed"
            raise EpisodeClaimedError(
                f"the limit of {self._max_calls} tool calls is reached: this attempt is closed and "
                f"{consequence}",
                truncated=True,
            )

    def _close_full(self) -> EpisodeClaimedError:
        """Close an attempt whose calls cannot be kept any more; returns the error for further calls."""
        # An evaluator must not judge a log that lacks calls in its middle, so the attempt ends here.
        if self._state.phase is Phase.READY:
            self._log_is_full = (
                "this attempt is closed and will be graded as it is: its log has reached its limit, or the "
                "server's disk is nearly full"
            )
            self._close("log")
        return EpisodeClaimedError(
            self._log_is_full or "this attempt was closed before the call was sent", truncated=True
        )

    def _keep_waiting(self, session: ToolSession | None, call: RunningCall) -> None:
        """Write the line of a call that has to wait. `session`: None before the tools can be called."""
        if not self.recorder.add_accepted(call):
            raise self._close_full()
        if session is not None:
            self._start(call, partial(self._start_server_and_send, session, call))

    def _start(self, call: RunningCall, work: Callable[[], Awaitable[None]]) -> None:
        """Have a task bring a call on its way, which waits while the disk cannot be written.

        If that fails, the call ends with the error.
        """

        async def run() -> None:
            try:
                while not call.is_ended:
                    try:
                        return await work()
                    except DiskFullError as error:
                        self._note_unwritten(error)
                        await anyio.sleep(UNWRITTEN_SECONDS)
            except DecathlonError as error:
                self._end(call, error)
            except Exception as error:
                log.exception("a call failed", extra=fields(episode=self._public_id))
                self._end(call, _fault(error))

        if self._tasks is not None:
            self._tasks.start_soon(run)
        else:
            self._end(call, _episode_ended())

    def _note_unwritten(self, error: DiskFullError) -> None:
        if time.monotonic() > self._unwritten_at + ANSWER_SECONDS:
            self._unwritten_at = time.monotonic()
            log.warning(
                "a call waits until its line can be written",
                extra=fields(episode=self._public_id, why=error.message),
            )

    async def _start_server_and_send(self, session: ToolSession, call: RunningCall) -> None:
        route = self._tools.route(call.name)
        await session.starts.ensure(route.server)
        params = await session.coerced(route, call.params)
        if not call.is_ended:
            # The attempt may have been closed meanwhile.
            if not call.replayed:
                self._require_open()
            self._send(session, call, route, params)

    async def _send_coerced(self, session: ToolSession, call: RunningCall) -> None:
        """Send a call of a dead server again, whose line has the arguments as the client sent them."""
        route = call.route
        assert route is not None, "it was sent before"
        with suppress(UnknownToolError):
            # Its schema is not in the line. A tool that is not listed any more still has the reply.
            route = self._tools.route(call.name)
        params = await session.coerced(route, call.params)
        if not call.is_ended:
            self._send(session, call, route, params)

    def _send(
        self, session: ToolSession, call: RunningCall, route: ToolRoute, params: CallParams | None = None
    ) -> None:
        """Write a call's line, and send it to its server, which runs.

        `params`: what the server gets, if not what the client sent. Raises EpisodeClaimedError if the log is
        full.
        """
        if call.request is None:
            request = session.driver.new_request_id()
            if not self.recorder.add_call(call, route, request):
                raise self._close_full()
            call.request = request
        call.state, call.route, call.sent_at = CallState.SENT, route, time.perf_counter()
        session.starts.begin_call()
        sending = session.request(
            route,
            call.params if params is None else params,
            call.request,
            on_outcome=partial(self._on_outcome, session, call),
            on_notification=call.on_notification,
        )
        if not session.driver.send_now(sending):
            self._start(call, partial(session.driver.send, sending))

    # from the driver to those who wait

    def _on_outcome(self, session: ToolSession, call: RunningCall, outcome: Outcome | None) -> None:
        """A call has its reply, or an error; None if the connection to the driver has ended."""
        if outcome is None:
            self._start(call, partial(self._end_lost, session, call))
        else:
            self._end(call, outcome)

    async def _end_lost(self, session: ToolSession, call: RunningCall) -> None:
        self._end(call, await session.driver.closed_error())

    def _on_absent(self, seconds: float) -> None:
        for call in self._operations.running:
            call.on_absent(seconds)

    def _cancel(self, call: RunningCall) -> None:
        if call.state is CallState.SENT and call.request is not None and self._session is not None:
            self._session.driver.cancel(call.request)
        self._end(call, DriverError(CANCELLED, reason=CANCELLED))

    def _end(self, call: RunningCall, outcome: Outcome) -> None:
        """Write a call's outcome, and give it to those who wait. No effect on one that has ended.

        They wait while the disk cannot be written: an evaluator must not judge a log that lacks replies.
        """
        if call.is_ended:
            return
        try:
            self._record_end(call, outcome)
        except DiskFullError as error:
            if self._tasks is not None:
                self._start(call, partial(self._end_later, call, outcome))
                return
            log.warning(
                "the reply to a call is lost", extra=fields(episode=self._public_id, why=error.message)
            )
            self.recorder.note_lost(call)
        except Exception as error:
            # Nobody else would end it, and its callers would wait for ever.
            log.exception("the end of a call could not be recorded", extra=fields(episode=self._public_id))
            outcome = _fault(error)
        self._operations.end(call, outcome)
        self._changed.set()
        if self.on_still is not None and not self._holds and self._is_still:
            self.on_still()

    async def _end_later(self, call: RunningCall, outcome: Outcome) -> None:
        await anyio.sleep(UNWRITTEN_SECONDS)
        self._end(call, outcome)

    def _record_end(self, call: RunningCall, outcome: Outcome) -> None:
        """Raises DiskFullError; then nothing has happened."""
        is_kept = self.recorder.add_reply(call, outcome)
        if call.sent_at is not None and call.route is not None and self._session is not None:
            self._metrics.called(_metric_outcome(outcome), call.sent_at)
            failure = outcome if isinstance(outcome, DriverError) else None
            self._session.starts.end_call(call.route.server, failure)
        if not is_kept:
            self._close_full()

    # the reply

    async def _first_reply(self, seq: int) -> Reply:
        """The reply of a call that has ended, from the trajectory. Raises the error that it failed with."""
        outcome = await self.recorder.read_outcome(seq)
        if outcome is None:
            raise LimitExceededError("the call has run, but its reply could not be kept")
        if isinstance(outcome, SandboxLostError) or (
            isinstance(outcome, DriverError) and outcome.data.get("reason") == "frozen"
        ):
            raise await self._explain(outcome)
        if isinstance(outcome, DecathlonError):
            raise outcome
        return outcome

    async def _explain(self, error: DecathlonError) -> DecathlonError:
        """The reason why a call failed, if it is the end of the attempt or of the episode; else `error`."""
        if isinstance(error, EpisodeClaimedError | UnknownToolError):
            return error
        state = self._state
        if error.code == "sandbox_lost":
            with anyio.move_on_after(LOST_SECONDS):
                await state.reach(Phase.CLAIMED, Phase.SCORED, Phase.ENDED)
        if state.phase in (Phase.CLAIMED, Phase.SCORED):
            why = f": {error.message}" if error.code == "sandbox_lost" else ""
            return EpisodeClaimedError(f"this attempt was closed while the call ran{why}")
        return state.end_error() if state.phase is Phase.ENDED else error


def _episode_ended() -> SandboxLostError:
    return SandboxLostError("sandbox lost: the episode ended")


def _fault(error: Exception) -> DecathlonError:
    return DecathlonError(f"a fault of the server: {type(error).__name__}")


def _metric_outcome(outcome: Outcome) -> CallOutcome:
    if isinstance(outcome, DecathlonError):
        return "cancelled" if outcome.data.get("reason") == CANCELLED else "lost"
    return "error" if outcome.result is None or outcome.is_error else "ok"
