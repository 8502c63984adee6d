"""One attempt at one task: what requests borrow, and the transitions that its runner drives.

An `EpisodeRunner` owns the episode and its sandboxes. Requests only borrow it: no state of an episode lives
in a request, so that any connection can reach it, or none.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Protocol, Self
from weakref import WeakSet

import anyio
import msgspec

from decathlon_mcp.background import Flag
from decathlon_mcp.driver_client.replies import CallParams, Reply
from decathlon_mcp.episodes.access import Principal, may_evaluate
from decathlon_mcp.episodes.admission import Ticket
from decathlon_mcp.episodes.calls import EpisodeCalls
from decathlon_mcp.episodes.lease import Lease
from decathlon_mcp.episodes.operations import Caller, RunningCall, call_digest_of_any_size
from decathlon_mcp.episodes.records import EpisodeRecords, OfferedTools, Progress, StoredEpisode
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.server_starts import ServerStarts
from decathlon_mcp.episodes.specification import Claim, EpisodeSpec
from decathlon_mcp.episodes.state import Ending, Phase, State
from decathlon_mcp.episodes.tool_lists import same_tools, shared_router
from decathlon_mcp.episodes.tools import ToolRoute, ToolRouter, ToolSession
from decathlon_mcp.errors import (
    DecathlonError,
    DriverError,
    EpisodeClaimedError,
    EpisodeEndedError,
    LimitExceededError,
    SandboxLostError,
    UnknownToolError,
)
from decathlon_mcp.grading.attempt import Attempt
from decathlon_mcp.grading.evaluation import UNGRADED
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.settings import RewardPolicy
from decathlon_mcp.storage.journal import Journal
from decathlon_mcp.storage.logged_calls import Origin
from decathlon_mcp.storage.store import Store
from decathlon_mcp.suites.prompts import Prompt
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.telemetry.metrics import EpisodeMetrics
from decathlon_mcp.types import JsonObject, as_json

log = logging.getLogger("decathlon.episodes")

LOST_SECONDS = 5.0
"""How long a call whose sandbox was lost waits for the runner to record why."""
MAX_ANSWER_BYTES = 1 << 20
"""Longest answer of a claim, in UTF-8."""
MAX_CAUSE_BYTES = 16 << 10
"""An ended episode, of which the registry keeps thousands, keeps the data of its cause up to this length."""


class ToolListener(Protocol):
    """A client that is notified when the tools of an episode have changed."""

    async def tools_changed(self, episode: Episode) -> None:
        """Notify the client. May take long, and must not raise."""
        ...


class Episode:
    """One attempt at one task. Its runner alone calls `close_attempt`, `record_verdict` and `mark_...`."""

    def __init__(
        self,
        spec: EpisodeSpec,
        *,
        sandbox_factory: SandboxFactory,
        ticket: Ticket,
        journal: Journal,
        metrics: EpisodeMetrics,
        store: Store | None = None,
    ) -> None:
        """A new episode. Raises AtCapacityError if the store cannot be written."""
        self.spec = spec
        self.sandbox_factory = sandbox_factory
        self.ticket = ticket
        self.journal = journal
        self.metrics = metrics
        self.lease = Lease(spec.limits)
        self.state = State()
        self.started_at = time.time()
        self.records = EpisodeRecords(store, spec.id)
        self._tools: OfferedTools | None = None
        self._router: ToolRouter | None = None
        self._current_router: ToolRouter | None = None
        self.tool_listeners: WeakSet[ToolListener] = WeakSet()
        self._tools_known = Flag()
        self._tool_session: ToolSession | None = None
        self._verdict: Verdict | None = None
        self._calls = EpisodeCalls(
            journal,
            metrics,
            label=spec.label,
            require_open=self._require_open,
            find_route=self._route,
            on_full=self._close_for_limit,
        )
        self._limit_reached = ""

    def restore(self, stored: StoredEpisode) -> None:
        """Continue an episode of a dead server, before a runner gets it.

        One that was not ready starts over. One that was ready is OPENING until its sandbox is taken back.
        """
        self.started_at = stored.started_at
        if stored.is_closed:
            self.lease.end()
        if stored.tools is not None and stored.phase is not Phase.ENDED:
            router = shared_router(stored.tools.servers, self.sandbox_factory.tool_names)
            self._set_tools(stored.tools, router)
            if stored.tools.changed:
                self._current_router = shared_router(stored.tools.current, self.sandbox_factory.tool_names)
        if stored.phase in (Phase.QUEUED, Phase.OPENING) and stored.verdict is None:
            self.records.progress = Progress(requested_ending=stored.progress.requested_ending)
            return
        self.records.progress = stored.progress
        self._verdict = stored.verdict
        if stored.phase is Phase.ENDED:
            self.state.end(stored.ending or Ending.FAULT)
            return
        opened_at = stored.progress.opened_at or stored.started_at
        self.lease.start(elapsed_seconds=max(0.0, time.time() - opened_at))
        # Whether a request has named it is not stored; its client gets the idle time to come back.
        self.lease.mark_used()
        if self.spec.held:
            self.lease.lose_client()
        self._tools_known.set()
        self.state.restore(Phase.OPENING if stored.phase is Phase.READY else stored.phase)

    @property
    def id(self) -> str:
        """The handle."""
        return self.spec.id

    @property
    def agent_id(self) -> str:
        return self.spec.agent_id

    @property
    def task_name(self) -> str:
        return self.spec.task_name

    @property
    def owner(self) -> Principal:
        return self.spec.owner

    @property
    def policy(self) -> RewardPolicy:
        return self.spec.policy

    @property
    def waiting_for(self) -> str | None:
        """What a queued episode waits for, as text for people; None if it is not queued."""
        return self.ticket.waiting_for

    @property
    def image_digest(self) -> str | None:
        """Digest of the agent's image, once its sandbox is open; None for a provider without images."""
        return self.records.progress.image_digest

    @property
    def was_ready(self) -> bool:
        """Whether the tools have been ready, so that the agent may have run something."""
        return self.records.progress.ready_at is not None

    @property
    def router(self) -> ToolRouter | None:
        """The tools' names, once they are known and until the end: as they were listed first."""
        return self._router

    @property
    def current_router(self) -> ToolRouter | None:
        """As `router`, with the tools that servers have now."""
        return self._current_router or self._router

    @property
    def tools(self) -> OfferedTools | None:
        """The tools, once they are known and until the end."""
        return self._tools

    @property
    def server_starts(self) -> ServerStarts | None:
        """What starts the servers of a ready episode."""
        return None if self._tool_session is None else self._tool_session.starts

    @property
    def has_called(self) -> bool:
        """Whether a tool's call has been sent to its server, so that the agent may have run something."""
        return self._calls.has_sent

    @property
    def calls(self) -> int:
        """Number of tool calls that were sent so far."""
        return self._calls.recorder.sent

    @property
    def claim(self) -> Claim | None:
        return self.records.progress.claim

    @property
    def is_graded(self) -> bool:
        """Whether its attempt, as it was closed, is graded; if not, its reward is 0."""
        cause = self.claim and self.claim.truncated_by
        return cause is None or self.sandbox_factory.grades_truncated or cause not in UNGRADED

    @property
    def verdict(self) -> Verdict | None:
        return self._verdict

    @property
    def requested_ending(self) -> Ending | None:
        """The ending that `close` asked for first, if it was called."""
        return self.records.progress.requested_ending

    @cached_property
    def prompt(self) -> Prompt:
        """The task's prompt; needs no sandbox. The first access reads files and may raise SuiteError."""
        return self.sandbox_factory.suite.prompt(
            self.spec.task,
            root=self.sandbox_factory.root(f"{self.spec.label}-agent"),
            launch_time=self.spec.launch_time,
            names=self.sandbox_factory.tool_names,
        )

    def hold(self, *, use: bool = True) -> AbstractContextManager[None]:
        """Keep the lease from expiring while a request is served. `use`: see `Lease.acquire`."""
        return self.lease.hold(use=use)

    def change_tools(self, server: str, tools: list[JsonObject]) -> bool:
        """A server has other tools from now on; False if they are the same as before.

        Raises SetUpError if two tools would have the same name.
        """
        if self._tools is None or self.state.phase is not Phase.READY:
            return False
        if same_tools(self._tools.current.get(server, []), tools):
            return False
        changed = replace(self._tools, changed={**self._tools.changed, server: tools})
        router = shared_router(changed.current, self.sandbox_factory.tool_names)
        self.records.update(self.state.phase, tools=changed)
        self._tools, self._current_router = changed, router
        return True

    async def known_tools(self) -> ToolRouter:
        """Wait until the tools are known, which may be before they can be called; they stay listed after the
        claim.

        Raises the cause of a failed set-up, or EpisodeEndedError.
        """
        await self._tools_known.wait()
        if self._router is None:
            raise self._end_error()
        return self._router

    async def set_up(self) -> None:
        """Wait until the set-up is over, whatever has come of it."""
        await self.state.reach(Phase.READY, Phase.CLAIMED, Phase.SCORED, Phase.ENDED)

    async def ready(self) -> ToolRouter:
        """Wait until the tools can be called.

        Raises the cause of a failed set-up, or EpisodeEndedError.
        """
        await self.set_up()
        if self._router is None:
            raise self._end_error()
        return self._router

    def running_calls(self) -> AbstractAsyncContextManager[None]:
        """Calls run in the body; those that still do at its end are cancelled. For the runner."""
        return self._calls.running()

    async def accept_call(self, name: str, params: CallParams, origin: Origin) -> RunningCall | int:
        """Accept a call of one of the task's tools; returns its handle for `reply_of`.

        The call is in the trajectory then, and runs whatever becomes of its client; before the episode is
        ready, it waits. If the request repeats or joins an earlier call (see `operations`), that one is
        returned, and nothing runs. Raises UnknownToolError, EpisodeClaimedError, EpisodeEndedError, the cause
        of a failed set-up, and BadRequestError for arguments that are no JSON object, or an operation that
        was another call.
        """
        digest = await call_digest_of_any_size(name, params.arguments)
        operations = self._calls.operations
        call = await operations.find(origin, digest)
        if call is None:
            if self._router is not None:
                self._route(name)
            if self.state.phase in (Phase.CLAIMED, Phase.SCORED, Phase.ENDED):
                self._require_open()
            return self._calls.accept(name, params.on_one_line(), origin, digest)
        if isinstance(call, RunningCall) and operations.remember_all(call, origin):
            self._calls.recorder.add_joined(call, origin)
        return call

    def find_call(self, origin: Origin) -> RunningCall | int | None:
        """The call of a request that has come before, for `reply_of`; None if it was not accepted."""
        return self._calls.operations.known(origin)

    async def reply_of(self, call: RunningCall | int, caller: Caller) -> Reply:
        """Wait for the reply of a call that was accepted.

        Raises the error that it failed with: CallTimeoutError, DriverError, LimitExceededError,
        SandboxLostError, EpisodeClaimedError, EpisodeEndedError, UnknownToolError.
        """
        if not isinstance(call, RunningCall):
            return await self._first_reply(call)
        outcome = await call.wait(caller)
        if isinstance(outcome, DecathlonError):
            # A copy: each caller adds its frames to the error that it raises.
            raise await self._explain_call_error(type(outcome)(outcome.message, **outcome.data))
        return outcome

    async def call(self, name: str, params: CallParams, *, caller: Caller | None = None) -> Reply:
        """Call a tool of the task and return its server's reply. Raises what the two halves raise."""
        caller = caller or Caller()
        return await self.reply_of(await self.accept_call(name, params, caller.origin), caller)

    def forget_old_calls(self) -> None:
        """Free what is only needed to repeat the replies of an episode that ended long ago."""
        self._calls.forget_old()

    def cancel_call(self, operation: str) -> None:
        """Cancel the call of an operation whose client will not come back; no effect if none is running."""
        self._calls.operations.abandon(operation)

    def _route(self, name: str) -> ToolRoute:
        """The route of a tool that is listed now, or was listed first. Raises UnknownToolError."""
        if self._current_router is not None:
            with suppress(UnknownToolError):
                return self._current_router.route(name)
        assert self._router is not None, "the tools are not known yet"
        return self._router.route(name)

    async def restore_calls(self) -> None:
        """Read the calls of a server that died from the trajectory, before the episode is READY again."""
        self._calls.restore(await anyio.to_thread.run_sync(self.journal.read_calls))

    def require_whole_record(self) -> None:
        """Raise SandboxLostError if the trajectory lacks calls that had been sent before the claim."""
        if self.claim is not None and self.calls < self.claim.calls:
            missing = self.claim.calls - self.calls
            raise SandboxLostError(
                f"the episode's record is damaged: {missing} of {self.claim.calls} calls are missing in its "
                "trajectory, which evaluators may judge"
            )

    @property
    def unanswered_requests(self) -> set[int]:
        """Ids of the driver's requests that `become_ready` will send again."""
        return self._calls.unanswered_requests

    def end_calls(self) -> None:
        """End the calls of a dead server whose attempt is closed: no tool can be called any more."""
        self._calls.end(EpisodeClaimedError("this attempt was closed while the call ran"))

    async def claim_done(
        self,
        answer: str | None,
        *,
        truncated: bool = False,
        turns: int | None = None,
        operation: str | None = None,
    ) -> bool:
        """Close the attempt; grading starts in the background. False if it was closed before.

        `truncated`: not the agent ended the attempt, but its client. `operation`: see `Claim`. Raises
        LimitExceededError for an answer over MAX_ANSWER_BYTES (the attempt stays open), the cause of a failed
        set-up, or EpisodeEndedError.
        """
        size = len(answer.encode("utf-8", "surrogatepass")) if answer else 0
        if size > MAX_ANSWER_BYTES:
            raise LimitExceededError(
                f"the answer has {size} bytes, more than the limit of {MAX_ANSWER_BYTES} bytes; the attempt "
                "is still open: claim it again with a shorter answer",
                limit_bytes=MAX_ANSWER_BYTES,
            )
        await self.ready()
        if self.state.phase is Phase.ENDED and self.claim is None:
            raise self._end_error()
        cause = "client" if truncated else None
        return self._accept_claim(Claim(not truncated, answer, cause, turns, operation))

    async def evaluate(self) -> Verdict:
        """Wait for the verdict; an attempt that is still open is closed first.

        Every call returns the same verdict. A cancelled call does not stop the grading.
        """
        await self.set_up()
        self._accept_claim(Claim(by_agent=False))
        await self.state.reach(Phase.SCORED, Phase.ENDED)
        if self._verdict is None:
            raise self._end_error()
        return self._verdict

    def close_attempt(self) -> None:
        """Close the attempt without a claim, if it is still open: no tool can be called any more.

        An attempt that a dead server left open is open, also if its sandbox cannot be taken back.
        """
        if self.was_ready and self.state.phase is Phase.OPENING:
            self.state.move(Phase.READY)
        self._accept_claim(Claim(by_agent=False))

    def close(self, ending: Ending = Ending.CLOSED) -> None:
        """End the episode without waiting: at once, or after grading if the attempt is claimed."""
        if self.requested_ending is None:
            self.records.update(self.state.phase, requested_ending=ending)
        if self.state.phase is not Phase.CLAIMED:
            self.lease.end()

    def attempt(self) -> Attempt:
        """What grading needs to know about the attempt; complete once it is claimed."""
        spec, factory, claim, progress = self.spec, self.sandbox_factory, self.claim, self.records.progress
        network = factory.network_for(spec.task)
        # Grading reads evaluators and rubrics now, unless preprocess may have written them.
        revision = factory.suite.revision_of(spec.task)
        changed = progress.suite_changed or (claim is not None and revision != progress.suite_revision)
        return Attempt(
            episode=spec.id,
            task=spec.task_name,
            suite=factory.suite.name,
            suite_revision=progress.suite_revision or revision,
            suite_changed=changed,
            suite_release=progress.suite_release,
            preprocess_failure=progress.preprocess_failure,
            isolation=factory.provider.isolation,
            unlimited=factory.provider.unlimited,
            agent_network=network,
            grader_network=network if spec.task.in_place else factory.grader_network_for(spec.task),
            launch_time=spec.launch_time,
            prompt=self.prompt,
            calls=self._calls.recorder.calls,
            call_counts=self._calls.recorder.counts,
            tools=self._router.offered if self._router else {},
            claimed=claim is not None and claim.by_agent,
            truncated_by=claim.truncated_by if claim else None,
            answer=claim.answer if claim else None,
            turns=claim.turns if claim else None,
            started_at=progress.ready_at,
            claimed_at=claim.at if claim else None,
            image_digest=progress.image_digest,
            dense=progress.dense,
        )

    def mark_opening(self) -> None:
        """The episode was admitted: QUEUED to OPENING. The absolute time limit starts."""
        self.records.update(Phase.OPENING, opened_at=time.time(), slots=self.ticket.slots)
        self.lease.start()
        self.state.move(Phase.OPENING)
        self.metrics.admitted()

    def mark_opened(self, agent: str, image_digest: str | None, *, dense: bool = False) -> None:
        """The agent's sandbox, or that of preprocess, is open under this name and will be set up now."""
        self.records.update(self.state.phase, agent=agent, image_digest=image_digest, dense=dense)

    def read_revision(self) -> None:
        """Note the revision of the files that the set-up is about to read. Blocks: run it in a thread."""
        factory = self.sandbox_factory
        # Not written yet: the set-up starts over if the server dies before it is done.
        self.records.progress = replace(
            self.records.progress,
            suite_revision=factory.suite.revision_of(self.spec.task),
            suite_release=factory.suite.release,
            suite_changed=factory.suite.common_digest() != factory.common_digest,
        )

    def note_preprocess_failure(self, failure: str) -> None:
        """Preprocess failed, and the suite plays on."""
        log.warning(
            "preprocess failed, which its suite ignores",
            extra=fields(episode=self.spec.label, task=self.task_name, why=failure),
        )
        self.journal.add("preprocess_failed", failure=failure)
        # It is written when the episode becomes ready; until then the set-up starts over.
        self.records.progress = replace(self.records.progress, preprocess_failure=failure)

    def offer(self, tools: OfferedTools, router: ToolRouter) -> None:
        """List these tools from now on, if none are listed yet: a list that was given never changes."""
        if self._tools is None and self.state.phase is not Phase.ENDED:
            self.records.update(self.state.phase, tools=tools)
            self._set_tools(tools, router)

    def _set_tools(self, tools: OfferedTools, router: ToolRouter) -> None:
        self._tools, self._router = tools, router
        self._tools_known.set()

    def mark_ready(self, tool_session: ToolSession, *, sealed: bool) -> None:
        """The set-up is done, and the tools are listed: OPENING to READY. `sealed`: see `Progress`."""
        self.records.update(Phase.READY, ready_at=datetime.now(UTC), sealed=sealed)
        self.lease.mark_ready()
        self.become_ready(tool_session)

    def become_ready(self, tool_session: ToolSession) -> None:
        """The tools can be called: OPENING to READY, as at the end of the set-up or of a recovery."""
        self._tool_session, self._router = tool_session, tool_session.router
        self._tools_known.set()
        self.state.move(Phase.READY)
        self.metrics.ready()
        self._calls.open(tool_session)

    def mark_captured(self) -> None:
        """The workspace is in an archive: the agent's sandbox is not needed any more."""
        self.records.update(self.state.phase, captured=True)

    def record_verdict(self, verdict: Verdict) -> None:
        """Keep the verdict, in memory and on disk. The phase changes later, with `mark_scored`."""
        self.records.set_verdict(verdict.to_json())
        self._verdict = verdict
        self.metrics.verdict_made(verdict.status)
        self.journal.write_verdict(verdict.to_json())
        if self.claim is not None:
            # The trajectory has it; the registry keeps thousands of ended episodes.
            self.records.progress = replace(self.records.progress, claim=replace(self.claim, answer=None))

    def mark_scored(self) -> None:
        """The sandboxes are gone and the verdict is a score: CLAIMED to SCORED."""
        self.records.update(Phase.SCORED)
        self.state.move(Phase.SCORED)

    def mark_ended(self, ending: Ending, cause: DecathlonError | None = None) -> None:
        """The episode is over and nothing of it is left but its journal."""
        self.records.end(ending)
        self.state.end(ending, None if cause is None else _without_frames(cause))
        self.metrics.ended(ending.name.lower())
        self._tool_session = self._router = self._current_router = self._tools = None
        self._tools_known.set()
        self._calls.end_for_good(self._end_error())
        # Read again if a client asks for it.
        self.__dict__.pop("prompt", None)
        self.journal.add("end", ending=str(ending), cause=cause.message if cause else None)
        self.journal.close()

    def _accept_claim(self, claim: Claim) -> bool:
        """READY to CLAIMED: no tool can be called any more. False if the attempt is not open."""
        if self.state.phase is not Phase.READY or self.lease.expired:
            return False
        self.records.update(Phase.CLAIMED, claim=replace(claim, calls=self.calls))
        # Neither the lease nor `close` may interrupt the grading.
        self.lease.suspend()
        self.state.move(Phase.CLAIMED)
        self.metrics.claimed()
        self.journal.add(
            "claim",
            by_agent=claim.by_agent,
            answer=claim.answer,
            truncated=claim.truncated_by is not None,
            turns=claim.turns,
        )
        return True

    def _require_open(self) -> None:
        """Raise the reason why no call may be sent; reaching the limit of calls closes the attempt."""
        if self.state.phase is Phase.ENDED:
            raise self._end_error()
        if self._tool_session is None or self.state.phase is not Phase.READY:
            if self._limit_reached:
                raise EpisodeClaimedError(self._limit_reached, truncated=True)
            raise EpisodeClaimedError("this attempt was claimed and is closed: no tool works any more")
        max_calls = self.spec.limits.max_calls
        if max_calls is not None and self.calls >= max_calls:
            self._accept_claim(Claim(by_agent=False, truncated_by="calls"))
            consequence = "will be graded as it is" if self.is_graded else "counts as failed"
            raise EpisodeClaimedError(
                f"the limit of {max_calls} tool calls is reached: this attempt is closed and {consequence}",
                truncated=True,
            )

    async def _first_reply(self, seq: int) -> Reply:
        """The reply of a call that has ended, from the trajectory. Raises the error that it failed with."""
        outcome = await self._calls.recorder.read_outcome(seq)
        if outcome is None:
            raise LimitExceededError("the call has run, but its reply could not be kept")
        if isinstance(outcome, SandboxLostError) or (
            isinstance(outcome, DriverError) and outcome.data.get("reason") == "frozen"
        ):
            raise await self._explain_call_error(outcome)
        if isinstance(outcome, DecathlonError):
            raise outcome
        return outcome

    def _close_for_limit(self) -> EpisodeClaimedError:
        """Close an attempt whose calls cannot be kept any more; returns the error for further calls."""
        # An evaluator must not judge a log that lacks calls in its middle, so the attempt ends here.
        if self.state.phase is Phase.READY:
            self._limit_reached = (
                "this attempt is closed and will be graded as it is: its log has reached its limit, or the "
                "server's disk is full"
            )
            self._accept_claim(Claim(by_agent=False, truncated_by="log"))
        return EpisodeClaimedError(
            self._limit_reached or "this attempt was closed before the call was sent", truncated=True
        )

    async def _explain_call_error(self, error: DecathlonError) -> DecathlonError:
        """The reason why a call failed, if it is the end of the attempt or of the episode; else `error`."""
        if isinstance(error, EpisodeClaimedError | UnknownToolError):
            return error
        if error.code == "sandbox_lost":
            with anyio.move_on_after(LOST_SECONDS):
                await self.state.reach(Phase.CLAIMED, Phase.SCORED, Phase.ENDED)
        if self.state.phase in (Phase.CLAIMED, Phase.SCORED):
            why = f": {error.message}" if error.code == "sandbox_lost" else ""
            return EpisodeClaimedError(f"this attempt was closed while the call ran{why}")
        return self._end_error() if self.state.phase is Phase.ENDED else error

    def _end_error(self) -> DecathlonError:
        if (cause := self.state.cause) is not None:
            # A copy: an exception that is raised again and again collects the frames of every request.
            return type(cause)(cause.message, **cause.data)
        return EpisodeEndedError(f"this episode is over: {self.state.ending}", reason=str(self.state.ending))


def _without_frames(cause: DecathlonError) -> DecathlonError:
    """An error that keeps nothing alive: without the frames it passed through and without long data."""
    data = cause.data if len(as_json(cause.data)) <= MAX_CAUSE_BYTES else {}
    return type(cause)(cause.message[:MAX_CAUSE_BYTES], **data)


class EpisodeAccess(msgspec.Struct, frozen=True):
    """What one client may do with an episode.

    `id` is the capability that the client presented: the episode's handle or its agent id. `reports_turns`:
    it is a controller, whose report of the agent's turns counts.
    """

    episode: Episode
    id: str
    can_evaluate: bool
    reports_turns: bool = False

    @classmethod
    def by_handle(cls, episode: Episode, principal: Principal) -> Self:
        """Access for a client that knows the handle.

        With tokens configured and policy `controller`, evaluation also requires a controller's token.
        """
        can_evaluate = may_evaluate(episode.policy, principal)
        # With a more open policy, the agent itself may know the handle.
        reports_turns = can_evaluate and (episode.policy == "controller" or principal.controls)
        return cls(episode, episode.id, can_evaluate, reports_turns)

    @classmethod
    def by_session(cls, episode: Episode, principal: Principal) -> Self:
        """Access for a session or a stdio connection that is the episode."""
        # Under policy `controller` such a client counts as an agent unless its token says otherwise, also on
        # a server without tokens: it never had to know the handle.
        can_evaluate = episode.policy != "controller" or principal.controls
        return cls(episode, episode.id if can_evaluate else episode.agent_id, can_evaluate)

    @classmethod
    def by_agent_id(cls, episode: Episode) -> Self:
        """Access for a client that knows only the agent id."""
        return cls(episode, episode.agent_id, can_evaluate=False)
