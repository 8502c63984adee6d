"""The calls of one episode: each runs exactly once, and a repeated request gets its reply.

A call is written to the trajectory before it is sent, and so is its reply before a request gets it. A call
needs no task of its own; a task is started for a call that has to wait before it is sent.

Of calls that have ended only digests and numbers are kept in memory; their replies are read from the
trajectory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from decathlon_mcp.background import Flag, background_tasks
from decathlon_mcp.driver.replies import CallParams, Reply
from decathlon_mcp.episodes.call import (
    NOT_KEPT_MESSAGE,
    Call,
    CallGate,
    KnownCalls,
    Outcome,
    Waiter,
    call_digest_of_any_size,
    outcome_member,
    outcome_of_line,
)
from decathlon_mcp.episodes.specification import EpisodeSpec
from decathlon_mcp.episodes.state import NOT_READY, Phase, State
from decathlon_mcp.episodes.tools.offered import EpisodeTools, ToolRoute
from decathlon_mcp.episodes.tools.tool_session import ToolSession
from decathlon_mcp.errors import (
    AtCapacityError,
    DecathlonError,
    DiskFullError,
    DriverError,
    EpisodeClaimedError,
    LimitExceededError,
    ProviderUnavailableError,
    SandboxLostError,
    UnknownToolError,
)
from decathlon_mcp.events import Called, CallOutcome, Emit
from decathlon_mcp.grading.attempt import TruncationCause
from decathlon_mcp.storage.trajectory import RequestKeys, Trajectory
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.episodes")

LOST_SECONDS = 5.0
"""How long a call whose sandbox was lost waits for the runner to record why."""
ANSWER_SECONDS = 300.0
"""How long the replies of an episode that has ended can still be had: as long as `decathlon_client` tries."""
MAX_UNANSWERED = 256
"""Calls of one episode that wait for their replies: as many as one session may have."""
CANCELLED = "cancelled"
UNWRITTEN_SECONDS = 1.0
"""Time between two tries to write the line of a call that the disk refuses. The call waits."""
NOT_SENT = "the call was not sent, and the attempt goes on: send it again later"
LOG_FULL = (
    "this attempt is closed and will be graded as it is: its log has reached its limit, or the server's disk "
    "is nearly full"
)


class EpisodeCalls:
    """Accepts an episode's calls and runs them to their end."""

    def __init__(
        self,
        spec: EpisodeSpec,
        trajectory: Trajectory,
        emit: Emit,
        *,
        state: State,
        tools: EpisodeTools,
        close: Callable[[TruncationCause], bool],
        readers: anyio.CapacityLimiter,
    ) -> None:
        """`close` closes the attempt for a limit that was reached, and returns whether it will be graded.

        `readers`: see `Admission`.
        """
        self.gate: CallGate | None = None
        """What holds calls back before they are sent."""
        self.known = KnownCalls()
        self.restored = Flag()
        """Requests wait for it: they may repeat a call of a server that died, which `restore` finds."""
        self.restored.set()
        self.sent_before_end: int | None = None
        """Number of calls of an episode that ended under a server before; its trajectory is not read."""
        self._spec = spec
        self._trajectory = trajectory
        self._emit = emit
        self._state = state
        self._tools = tools
        self._close = close
        self._readers = readers
        self._reading = anyio.Lock()
        """Each episode reads one reply at a time, so that those of others wait little."""
        self._is_log_full = False
        self._tasks: TaskGroup | None = None
        self._session: ToolSession | None = None
        """What calls the tools: from READY on, or earlier for the calls of another episode."""

    @property
    def sent(self) -> int:
        """Number of calls that were sent so far, by this server or a dead server."""
        return self._trajectory.index.sent if self.sent_before_end is None else self.sent_before_end

    @property
    def last(self) -> int:
        """Number of the newest call, from 1; numbers of another episode's calls come before the first."""
        return max(self._spec.calls_before, self._trajectory.index.last)

    @property
    def unanswered(self) -> tuple[Call, ...]:
        """The calls without a reply so far."""
        return tuple(self.known.running.values())

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Calls can be sent in the body; `end` ends calls that still run at its end."""
        async with background_tasks() as self._tasks:
            try:
                yield
            finally:
                self._tasks = None

    # a request and its call

    async def accept(self, name: str, params: CallParams, waiter: Waiter) -> Call:
        """Accept a call of one of the task's tools, for `reply_of`.

        The call is in the trajectory then, and runs whatever becomes of its client; before the episode is
        ready, it waits. If the request repeats an earlier call, the earlier call is returned, and nothing
        runs. The request, `waiter`, ends with `Call.remove`. Raises UnknownToolError, EpisodeClaimedError,
        EpisodeEndedError, the cause of a failed set-up, AtCapacityError while too many calls wait, and
        BadRequestError for arguments that are no JSON object, or an operation that was another call.
        """
        digest = await call_digest_of_any_size(name, params.arguments)
        await self.restored.wait()
        keys = waiter.keys
        call = await self.known.find(keys, digest)
        if call is None:
            try:
                call = self._begin(name, params, keys, digest)
            except DiskFullError as error:
                raise DiskFullError(f"{error.message}; {NOT_SENT}", **error.data) from None
        elif not call.is_ended and self.known.remember(call.seq, digest, keys.texts):
            with suppress(DiskFullError):
                self._trajectory.add("joined", seq=call.seq, digest=digest, **msgspec.to_builtins(keys))
        call.add(waiter)
        return call

    async def find(self, waiter: Waiter) -> Call | None:
        """The call of a request that has come before, for `reply_of`; None if it was not accepted."""
        await self.restored.wait()
        call = self.known.by_keys(waiter.keys)
        if call is not None:
            call.add(waiter)
        return call

    async def reply_of(self, call: Call, waiter: Waiter) -> Reply:
        """Wait for the reply of a call that was accepted.

        Raises the error that it failed with: CallTimeoutError, DriverError, LimitExceededError,
        SandboxLostError, EpisodeClaimedError, EpisodeEndedError, UnknownToolError. Raises
        ProviderUnavailableError while the sandbox cannot be reached; the call goes on, for a request that
        comes back.
        """
        await call.wait(waiter)
        if (outcome := call.outcome) is None:
            async with self._reading:
                outcome = await anyio.to_thread.run_sync(
                    _read_outcome, self._trajectory, call.seq, limiter=self._readers
                )
        if outcome is None:
            raise LimitExceededError("the call has run, but its reply could not be kept")
        if isinstance(outcome, DecathlonError):
            # A copy: each request adds its frames to the error that it raises.
            error = type(outcome)(outcome.message, **outcome.data)
            was_read = call.outcome is None
            is_end = isinstance(error, SandboxLostError) or error.data.get("reason") == "frozen"
            raise error if was_read and not is_end else await _explained(error, self._state)
        return outcome

    def cancel(self, operation: str) -> None:
        """Cancel the call of an operation whose client will not come back; no effect if none is running."""
        call = self.known.by_keys(RequestKeys(operation))
        if call is not None and not call.is_ended:
            call.abandon()

    # the episode and its calls

    async def restore(self, *, starts_over: bool = False) -> None:
        """Read the calls of a server that died from the trajectory, before the episode is READY again.

        If the set-up starts over, calls copied from another episode, which will be made again, are removed
        from the trajectory. Raises OSError.
        """
        if starts_over and self._spec.calls_before:
            await anyio.to_thread.run_sync(self._trajectory.remove_calls, self._spec.calls_before)
        logged = await anyio.to_thread.run_sync(self._trajectory.read_calls)
        for each in logged.keys:
            self.known.remember(each.seq, each.digest, (each.key,))
        for line in logged.unanswered:
            call = Call.of_line(line)
            call.on_cancel = self._cancel
            self.known.add(call)
        self.restored.set()

    def open(self, session: ToolSession) -> None:
        """The tools can be called: send what was accepted before, and get the replies that a dead server had
        not. Its calls are sent again under their old ids.

        The driver ignores calls that it already has, and sends their replies anyway.
        """
        self._session = session
        for call in self.unanswered:
            if call.sent_at is None:
                self._start(call, partial(self._bring, session, call))

    def end(self, error: DecathlonError | None = None) -> None:
        """End what still runs. `error`: of the episode, which is over; None: only its attempt is closed.

        A server that closes an attempt of a dead server cannot call its tools any more.
        """
        why = error or EpisodeClaimedError("this attempt was closed while the call ran")
        for call in self.unanswered:
            self._end(call, why)
        if error is not None:
            self.restored.set()
            self._session = None
            asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._forget)

    def _forget(self) -> None:
        """Free the memory of an episode that is over: no client asks for a reply any more."""
        self._trajectory.forget()
        self.known = KnownCalls()

    async def replay(self, session: ToolSession, seq: int, name: str, params: CallParams) -> Outcome:
        """Make a call of another episode again under its number, before the tools can be called.

        Returns when it has ended. Raises UnknownToolError, and EpisodeClaimedError if the log is full.
        """
        digest = await call_digest_of_any_size(name, params.arguments)
        self._session = session
        self._tools.route(name)
        call = self._begin(name, params, RequestKeys(), digest, replayed=seq)
        call.add(waiter := Waiter())
        await call.wait(waiter)
        assert call.outcome is not None
        return call.outcome

    # from the acceptance to the driver

    def _begin(
        self, name: str, params: CallParams, keys: RequestKeys, digest: str, *, replayed: int | None = None
    ) -> Call:
        """Begin a new call; if this raises, nothing has happened. `replayed`: its number, see `replay`."""
        offered = self._tools.offered
        route = None if offered is None else offered.route(name)
        is_ready = self._state.phase not in NOT_READY
        if is_ready:
            self._require_open()
        if len(self.known.running) >= MAX_UNANSWERED:
            raise AtCapacityError(
                f"{MAX_UNANSWERED} calls of this episode wait for their replies", retryAfterSeconds=1.0
            )
        call = Call(
            seq=self.last + 1 if replayed is None else replayed,
            name=name,
            params=params,
            digest=digest,
            started_at=time.time(),
            keys=keys,
            on_cancel=self._cancel,
            replayed=replayed is not None,
        )
        session = self._session if is_ready or call.replayed else None
        if (
            session is not None
            and route is not None
            and session.starts.is_running(route.server)
            and not session.filters(route)
            and (self.gate is None or not self.gate.holds(call))
        ):
            self._send(session, call, route)
        else:
            self._write("accepted", call)
            self.known.add(call)
            if session is not None:
                self._start(call, partial(self._bring, session, call))
        return call

    def _write(self, event: str, call: Call, **members: object) -> None:
        """Write a call's line. Raises EpisodeClaimedError if the log is full, and DiskFullError."""
        if not self._trajectory.add(event, **members, **call.line()):
            raise self._close_full()

    def _start(self, call: Call, work: Callable[[], Awaitable[None]]) -> None:
        """Have a task bring a call on its way, which waits while the disk cannot be written.

        If that fails, the call ends with the error. Once the episode ends, its end is the call's.
        """

        async def run() -> None:
            is_logged = False
            try:
                while not call.is_ended:
                    try:
                        return await work()
                    except DiskFullError as error:
                        if not is_logged:
                            log.warning(
                                "a call waits until its line can be written",
                                extra=fields(episode=self._spec.public_id, why=error.message),
                            )
                        is_logged = True
                        await anyio.sleep(UNWRITTEN_SECONDS)
            except DecathlonError as error:
                self._end(call, error)
            except Exception as error:
                log.exception("a call failed", extra=fields(episode=self._spec.public_id))
                self._end(call, _fault(error))

        if self._tasks is not None:
            self._tasks.start_soon(run)

    async def _bring(self, session: ToolSession, call: Call) -> None:
        """Send a call that waits: for its server's start or its arguments, and for the end of a pause.

        A call of a dead server has its reply, or its server runs. A tool that is not listed any more has no
        schema for its arguments.
        """
        is_new = call.request is None
        if is_new:
            if self.gate is not None:
                await self.gate.passed(call)
            route = self._tools.route(call.name)
            await session.starts.ensure(route.server)
        else:
            route = call.route
            assert route is not None, "it was sent before"
            with suppress(UnknownToolError):
                route = self._tools.route(call.name)
        params = await session.filtered(route, call.params)
        if not call.is_ended:
            if is_new and not call.replayed:
                self._require_open()  # the attempt may have been closed meanwhile
            self._send(session, call, route, params)

    def _send(
        self, session: ToolSession, call: Call, route: ToolRoute, params: CallParams | None = None
    ) -> None:
        """Write a call's line, and send it to its server, which runs.

        `params`: what the server gets, if not what the client sent. Raises EpisodeClaimedError if the log is
        full.
        """
        if call.request is None:
            request = session.driver.new_request_id()
            self._write("call", call, server=route.server, tool=route.tool, request=request)
            call.request = request
            if call.known is None:
                self.known.add(call)
        call.route, call.sent_at = route, time.perf_counter()
        session.driver.call(
            call.request,
            route.server,
            (call.params if params is None else params).for_tool(route.tool),
            truncation=session.truncation_for(route),
            on_outcome=partial(self._on_outcome, session, call),
            on_notification=call.on_notification,
        )

    # the attempt to which calls belong

    def _require_open(self) -> None:
        """Raise the reason why no call may be sent; at the limit of calls, close the attempt."""
        if self._state.phase is Phase.ENDED:
            raise self._state.end_error()
        if self._state.phase is not Phase.READY:
            if self._is_log_full:
                raise EpisodeClaimedError(LOG_FULL, truncated=True)
            raise EpisodeClaimedError("this attempt was claimed and is closed: no tool works any more")
        max_calls = self._spec.limits.max_calls
        if max_calls is not None and self.sent >= max_calls:
            consequence = "will be graded as it is" if self._close("calls") else "counts as failed"
            raise EpisodeClaimedError(
                f"the limit of {max_calls} tool calls is reached: this attempt is closed and {consequence}",
                truncated=True,
            )

    def _close_full(self) -> EpisodeClaimedError:
        """Close an attempt whose calls cannot be kept any more; returns the error for further calls."""
        # An evaluator must not judge a log that lacks calls in its middle, so the attempt ends here.
        if self._state.phase is Phase.READY:
            self._is_log_full = True
            self._close("log")
        message = LOG_FULL if self._is_log_full else "this attempt was closed before the call was sent"
        return EpisodeClaimedError(message, truncated=True)

    # from the driver to the waiting requests

    def _on_outcome(self, session: ToolSession, call: Call, outcome: Outcome | None) -> None:
        """A call has its reply, or an error; None if the connection to the driver has ended."""
        if outcome is not None:
            self._end(call, outcome)
            return

        async def end_lost() -> None:
            self._end(call, await session.driver.closed_error())

        self._start(call, end_lost)

    def on_absent(self, seconds: float) -> None:
        """Answer waiting requests, which may be sent again: the sandbox was out of reach for so long."""
        for call in self.unanswered:
            for waiter in call.waiters:
                waiter.send_away(
                    ProviderUnavailableError(
                        f"the server has not reached the sandbox for {seconds:.0f} s: a fault of its machine "
                        "or engine, not of the agent or the task. The call may have run. The same request "
                        "again, with its operation id or, in its session, with the same arguments, gets its "
                        "reply and does not repeat it",
                        mayHaveRun=True,
                        absentSeconds=round(seconds, 1),
                    )
                )

    def _cancel(self, call: Call) -> None:
        if call.request is not None and self._session is not None:
            self._session.driver.cancel(call.request)
        self._end(call, DriverError(CANCELLED, reason=CANCELLED))

    def _end(self, call: Call, outcome: Outcome) -> None:
        """Write a call's outcome, and give it to the waiting requests. No effect on a call that has ended.

        Requests wait while the disk cannot be written: an evaluator must not judge a log that lacks replies.
        """
        if call.is_ended:
            return
        try:
            is_kept = _write_reply(self._trajectory, call, outcome)
            if call.sent_at is not None and call.route is not None and self._session is not None:
                self._emit(Called(_metric_outcome(outcome), call.sent_at))
                if isinstance(outcome, DriverError):
                    self._session.starts.note_failure(call.route.server, outcome)
            if not is_kept:
                self._close_full()
        except DiskFullError as error:

            async def end_later() -> None:
                await anyio.sleep(UNWRITTEN_SECONDS)
                self._end(call, outcome)

            if self._tasks is not None:
                self._start(call, end_later)
                return
            log.warning(
                "the reply to a call is lost", extra=fields(episode=self._spec.public_id, why=error.message)
            )
            self._trajectory.index.count_reply(call.seq, failed=True)
        except Exception as error:
            # Nobody else would end it, and its callers would wait for ever.
            log.exception(
                "the end of a call could not be recorded", extra=fields(episode=self._spec.public_id)
            )
            outcome = _fault(error)
        self.known.end(call, outcome)
        if self.gate is not None:
            self.gate.call_ended()


async def _explained(error: DecathlonError, state: State) -> DecathlonError:
    """The reason why a call failed, if it is the end of the attempt or of the episode; else `error`."""
    if isinstance(error, EpisodeClaimedError | UnknownToolError):
        return error
    if error.code == "sandbox_lost":
        with anyio.move_on_after(LOST_SECONDS):
            await state.reach(Phase.CLAIMED, Phase.SCORED, Phase.ENDED)
    if state.phase in (Phase.CLAIMED, Phase.SCORED):
        why = f": {error.message}" if error.code == "sandbox_lost" else ""
        return EpisodeClaimedError(f"this attempt was closed while the call ran{why}")
    return state.end_error() if state.phase is Phase.ENDED else error


def _write_reply(trajectory: Trajectory, call: Call, outcome: Outcome) -> bool:
    """Write a call's reply or the error that it failed with; False if it cannot be kept.

    Instead of a reply that is too long, the fact is written, if there is room for that. Raises DiskFullError;
    then nothing has happened.
    """
    name, value = outcome_member(outcome)
    failed = name != "result" or (isinstance(outcome, Reply) and outcome.is_error)
    line = {"seq": call.seq, "failed": failed, "seconds": round(time.time() - call.started_at, 6)}
    if trajectory.add("reply", **line, **{name: value}):
        return True
    _, failure = outcome_member(LimitExceededError(NOT_KEPT_MESSAGE))
    if not trajectory.add("reply", **line, failure=failure):
        trajectory.index.count_reply(call.seq, failed=failed)
    return False


def _read_outcome(trajectory: Trajectory, seq: int) -> Outcome | None:
    """The reply of a call that has ended; None if it was not kept. Blocks."""
    try:
        line = trajectory.line(trajectory.index.places(seq)[1])
    except OSError as error:
        log.warning("the reply to a call cannot be read", extra=fields(why=error.strerror))
        return None
    return None if line is None else outcome_of_line(line)


def _fault(error: Exception) -> DecathlonError:
    return DecathlonError(f"a fault of the server: {type(error).__name__}")


def _metric_outcome(outcome: Outcome) -> CallOutcome:
    if isinstance(outcome, DecathlonError):
        return "cancelled" if outcome.data.get("reason") == CANCELLED else "lost"
    return "error" if outcome.result is None or outcome.is_error else "ok"
