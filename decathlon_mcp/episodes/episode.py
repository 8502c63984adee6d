"""One attempt at one task: what requests borrow, and the transitions that its runner drives.

An `EpisodeRunner` owns the episode and its sandboxes. Requests only borrow it: no state of an episode lives
in a request, so that any connection can reach it, or none.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec

from decathlon_mcp import __version__
from decathlon_mcp.background import Flag, in_any_case
from decathlon_mcp.episodes.admission import Ticket
from decathlon_mcp.episodes.calls import EpisodeCalls
from decathlon_mcp.episodes.lease import Lease
from decathlon_mcp.episodes.records import EpisodeRecords, Progress, SandboxRecords, StoredEpisode
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.specification import Claim, EpisodeSpec, Instant, Principal
from decathlon_mcp.episodes.state import Ending, Phase, State
from decathlon_mcp.episodes.tools.offered import EpisodeTools, offered_tools
from decathlon_mcp.episodes.tools.tool_session import ToolSession
from decathlon_mcp.errors import AtCapacityError, DecathlonError, LimitExceededError
from decathlon_mcp.events import Admitted, Claimed, Emit, Ended, Judged, Ready
from decathlon_mcp.grading.attempt import TruncationCause
from decathlon_mcp.grading.evaluation import is_graded
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.storage.disk import RETRY_SECONDS, DiskSpace, is_full
from decathlon_mcp.storage.kept_files import KeptFiles
from decathlon_mcp.storage.store import Store
from decathlon_mcp.storage.trajectory import MAX_NOTE_LINE_BYTES, MAX_NOTES, Trajectory
from decathlon_mcp.suites.prompts import Prompt
from decathlon_mcp.types import JsonObject, NoteRole, as_json

MAX_ANSWER_BYTES = 1 << 20
"""Longest answer of a claim, in UTF-8."""
MAX_LOG_BYTES = 256 << 20
"""Limit on the calls in one episode's trajectory; evaluators get about the same again as `traj_log.json`."""
TRAJECTORY_VERSION = 1
"""The version in the first line of a trajectory."""


class Episode:
    """One attempt at one task. Its runner alone calls `record_verdict` and `mark_...`."""

    def __init__(
        self,
        spec: EpisodeSpec,
        *,
        sandbox_factory: SandboxFactory,
        ticket: Ticket,
        folder: Path,
        disk: DiskSpace | None,
        emit: Emit,
        store: Store | None = None,
        archive: Store | None = None,
    ) -> None:
        """`folder`: for its files, which do not exist before `create`."""
        self.spec = spec
        self.sandbox_factory = sandbox_factory
        self.ticket = ticket
        self.trajectory = Trajectory(folder, max_calls_bytes=MAX_LOG_BYTES, disk=disk)
        self.files = KeptFiles(folder, disk)
        self.emit = emit
        self.lease = Lease(spec.limits)
        self.state = State(spec.public_id)
        self.started_at = time.time()
        self.records = EpisodeRecords(store, spec.id, archive=archive)
        self.sandbox_records = SandboxRecords(store, spec.id)
        self.verdict: Verdict | None = None
        self.tools = EpisodeTools(self.state)
        self.calls = EpisodeCalls(
            spec,
            self.trajectory,
            emit,
            state=self.state,
            tools=self.tools,
            close=self._close_for_limit,
            readers=ticket.admission.readers,
        )
        self.waits_for_room = False
        """Whether the grading waits for space on the disk."""

    def create(self) -> None:
        """Begin its files and its row: what is fixed at the start, without secrets.

        Room for the verdict is reserved, so that a full disk is found now. Raises AtCapacityError for that,
        OSError, and SuiteError for a broken prompt; then nothing is left.
        """
        spec, factory = self.spec, self.sandbox_factory
        with ExitStack() as on_error:
            try:
                self.trajectory.create()
                on_error.callback(shutil.rmtree, self.files.folder, ignore_errors=True)
                on_error.callback(self.trajectory.close)
                self.files.reserve_verdict()
            except OSError as error:
                if not is_full(error):
                    raise
                raise AtCapacityError(
                    f"the state folder has no room for another episode: {error.strerror}",
                    retryAfterSeconds=RETRY_SECONDS,
                ) from None
            _ = self.prompt
            self.trajectory.add(
                "start",
                version=TRAJECTORY_VERSION,
                suite=factory.suite.name,
                task=spec.task_name,
                **({"labels": dict(spec.labels)} if spec.labels else {}),
                **spec.reported,
                launch_time=spec.launch_time.isoformat(),
                language=factory.suite.language,
                names=factory.tool_names,
                limits=asdict(spec.limits),
                policy=spec.policy,
                provider=factory.provider.name,
                isolation=factory.provider.isolation,
                release=__version__,
            )
            self.records.insert(spec, factory.suite.name, self.started_at)
            on_error.pop_all()

    def restore(self, stored: StoredEpisode) -> None:
        """Continue an episode of a dead server, before a runner gets it.

        An episode that was not ready starts over. A ready episode is OPENING until its sandbox is taken back.
        """
        self.started_at = stored.started_at
        self.sandbox_records.former = {row.name: row for row in stored.sandboxes}
        is_over = stored.phase is Phase.ENDED
        if not is_over:
            self.calls.restored = Flag()
        if stored.is_closed:
            self.lease.end()
        if stored.tools is not None and not is_over:
            names = self.sandbox_factory.tool_names
            self.tools.offer(offered_tools(as_json(stored.tools), names))
        if stored.phase in (Phase.QUEUED, Phase.OPENING) and stored.verdict is None:
            self.records.progress = Progress(requested_ending=stored.progress.requested_ending)
            return
        self.records.progress = stored.progress
        self.verdict = stored.verdict
        if is_over:
            self.state.end(stored.ending or Ending.FAULT)
            self.tools.end()
            self.calls.sent_before_end = stored.calls
            return
        progress = stored.progress
        elapsed = None if progress.opened is None else progress.opened.until(Instant.now())
        if elapsed is None:  # the machine was started again
            elapsed = time.time() - (progress.opened_at or stored.started_at)
        self.lease.start(elapsed_seconds=max(0.0, elapsed))
        # Whether a request has named it is not stored; its client gets the idle time to come back.
        self.lease.mark_used()
        if self.spec.ends_with_response:
            self.lease.lose_client()
        self.state.phase = Phase.OPENING if stored.phase is Phase.READY else stored.phase

    @property
    def id(self) -> str:
        """The handle."""
        return self.spec.id

    @property
    def public_id(self) -> str:
        return self.spec.public_id

    @property
    def was_ready(self) -> bool:
        """Whether the tools have been ready, so that the agent may have run something."""
        return self.records.progress.ready_at is not None

    @property
    def claim(self) -> Claim | None:
        return self.records.progress.claim

    @property
    def is_graded(self) -> bool:
        """Whether its attempt, as it was closed, is graded; if not, its reward is 0."""
        return is_graded(self.sandbox_factory.suite, self.claim and self.claim.truncated_by)

    @property
    def reported(self) -> JsonObject:
        """The members of `EpisodeSpec.reported`, as they are now."""
        noted = self.records.progress.facts.noted()
        return {name: noted.get(name, value) for name, value in self.spec.reported.items()}

    @cached_property
    def prompt(self) -> Prompt:
        """The task's prompt; needs no sandbox. The first access reads files and may raise SuiteError.

        Of a task that is gone or broken since the episode began, it says that.
        """
        if self.spec.task.errors:
            return Prompt(None, self.spec.task.errors[0].message)
        return self.sandbox_factory.suite.prompt(
            self.spec.task,
            root=self.sandbox_factory.agent_root(self.public_id),
            launch_time=self.spec.launch_time,
            names=self.sandbox_factory.tool_names,
        )

    @property
    def waits_for(self) -> str | None:
        """What the episode waits for, as text for people: a place, or space to be graded; None if nothing."""
        return "space on the server's disk" if self.waits_for_room else self.ticket.waiting_for

    async def set_up(self) -> None:
        """Wait until the set-up is over, whatever has come of it."""
        await self.state.reach(Phase.READY, Phase.CLAIMED, Phase.SCORED, Phase.ENDED)

    async def ready(self) -> None:
        """Wait until the tools can be called.

        Raises the cause of a failed set-up, or EpisodeEndedError.
        """
        await self.set_up()
        if self.tools.offered is None:
            raise self.state.end_error()

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
            raise self.state.end_error()
        cause = "client" if truncated else None
        return self.accept_claim(Claim(not truncated, answer, cause, turns, operation))

    async def evaluate(self) -> Verdict:
        """Wait for the verdict; an attempt that is still open is closed first.

        Every call returns the same verdict. A cancelled call does not stop the grading.
        """
        await self.set_up()
        self.accept_claim(Claim(by_agent=False))
        await self.state.reach(Phase.SCORED, Phase.ENDED)
        if self.verdict is None:
            raise self.state.end_error()
        return self.verdict

    def close(self, ending: Ending = Ending.CLOSED, *, reason: str = "") -> None:
        """End the episode without waiting: at once, or after grading if the attempt is claimed.

        `reason`: a client's words; the cause of the end, unless the attempt has a verdict then.
        """
        if self.records.progress.requested_ending is None:
            self.note(requested_ending=ending, closing_reason=reason)
        if self.state.phase is not Phase.CLAIMED:
            self.lease.end()

    def note(self, **changes: Any) -> None:
        """Write what has changed of the progress, in this phase; see `EpisodeRecords.update`."""
        self.records.update(self.state.phase, **changes)

    def add_note(
        self,
        text: str,
        *,
        role: NoteRole,
        usage: Mapping[str, float] | None = None,
        calls: int | None = None,
    ) -> None:
        """Write a message of the model's into the trajectory; evaluators do not see it.

        `usage`: token counts and costs. `calls`: how many calls came before it, at most as many as there are;
        None: all. Raises the error of an ended episode, and LimitExceededError for a note that is too long or
        one too many.
        """
        if self.state.phase is Phase.ENDED:
            raise self.state.end_error()
        sent = self.calls.sent
        is_kept = self.trajectory.add(
            "note",
            calls=sent if calls is None else min(calls, sent),
            role=role,
            text=text,
            **({"usage": dict(usage)} if usage else {}),
        )
        if not is_kept:
            raise LimitExceededError(
                f"the note is not kept: its line has at most {MAX_NOTE_LINE_BYTES} bytes, an episode has at "
                f"most {MAX_NOTES} notes of limited size, and the disk must have room"
            )

    # for the runner

    def mark_opening(self) -> None:
        """The episode was admitted: QUEUED to OPENING. The absolute time limit starts."""
        self.records.update(
            Phase.OPENING, opened_at=time.time(), opened=Instant.now(), slots=self.ticket.slots
        )
        self.lease.start()
        self.state.move(Phase.OPENING)
        self.emit(Admitted())

    def mark_ready(self, tool_session: ToolSession, *, sealed: bool, tools: str) -> None:
        """The set-up is done, and the tools are listed: OPENING to READY.

        `sealed`: see `Progress`. `tools`: digest of the list, see `KeptTools`.
        """
        facts = self.records.progress.facts
        self.trajectory.add(
            "ready",
            tools=tools,
            prompt={"system": self.prompt.system, "task": self.prompt.task},
            suite_revision=facts.suite_revision,
            **({} if facts.image_digest is None else {"image_digest": facts.image_digest}),
            **({"prepared": True} if facts.prepared else {}),
        )
        self.records.update(Phase.READY, ready_at=datetime.now(UTC), ready=Instant.now(), sealed=sealed)
        self.lease.mark_ready()
        self.become_ready(tool_session)

    def become_ready(self, tool_session: ToolSession) -> None:
        """The tools can be called: OPENING to READY, as at the end of the set-up or of a recovery."""
        self.state.move(Phase.READY)
        self.emit(Ready())
        self.calls.open(tool_session)

    def record_verdict(self, verdict: Verdict) -> None:
        """Keep the verdict, in memory and on disk. The phase changes once the sandboxes are gone."""
        self.records.write(verdict=verdict.to_json())
        self.verdict = verdict
        self.emit(Judged(verdict.status, verdict.reward, verdict.success))
        self.files.write_verdict(verdict.to_json())
        if self.claim is not None:
            # The trajectory has it; the registry keeps thousands of ended episodes.
            self.records.progress = replace(self.records.progress, claim=replace(self.claim, answer=None))

    def mark_ended(self, ending: Ending, cause: DecathlonError | None = None) -> None:
        """The episode is over and nothing of it is left but its files. Raises nothing."""
        message = cause.message if cause else None
        # First: clients wait for it.
        self.state.end(ending, cause)
        in_any_case(
            lambda: self.records.end(ending, cause=message, calls=self.calls.sent),
            lambda: self.emit(Ended(ending.name.lower())),
            self.tools.end,
            lambda: self.calls.end(self.state.end_error()),
            # Read again if a client asks for it.
            lambda: self.__dict__.pop("prompt", None),
            lambda: self.trajectory.add("end", ending=str(ending), cause=message),
            self.trajectory.close,
            self.files.release_verdict,
        )

    def accept_claim(self, claim: Claim) -> bool:
        """READY to CLAIMED: no tool can be called any more. False if the attempt is not open."""
        if self.state.phase is not Phase.READY or self.lease.expired:
            return False
        sent = self.calls.sent
        self.records.update(Phase.CLAIMED, claim=replace(claim, calls=sent), calls=sent)
        # Neither the lease nor `close` may interrupt the grading.
        self.lease.suspend()
        self.state.move(Phase.CLAIMED)
        self.emit(Claimed())
        self.trajectory.add(
            "claim",
            by_agent=claim.by_agent,
            answer=claim.answer,
            truncated=claim.truncated_by is not None,
            turns=claim.turns,
        )
        return True

    def _close_for_limit(self, cause: TruncationCause) -> bool:
        """Close the attempt because a limit was reached; returns whether it will be graded."""
        self.accept_claim(Claim(by_agent=False, truncated_by=cause))
        return self.is_graded


class EpisodeAccess(msgspec.Struct, frozen=True):
    """What one client may do with an episode.

    `id` is the capability that the client presented: the episode's handle or its agent id. `reports_turns`:
    it is a controller, whose report of the agent's turns counts.

    Decided 2026-11-21: an agent gets its own id and not a token. With a token it could start other episodes
    of the same task and evaluate guesses there.
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
        can_evaluate = principal.may_evaluate(episode.spec.policy)
        # With a more open policy, the agent itself may know the handle.
        reports_turns = can_evaluate and (episode.spec.policy == "controller" or principal.controls)
        return cls(episode, episode.id, can_evaluate, reports_turns)

    @classmethod
    def by_session(cls, episode: Episode, principal: Principal) -> Self:
        """Access for a session or a stdio connection that is the episode."""
        # Under policy `controller` such a client counts as an agent unless its token says otherwise, also on
        # a server without tokens: it never had to know the handle.
        can_evaluate = episode.spec.policy != "controller" or principal.controls
        return cls(episode, episode.id if can_evaluate else episode.spec.agent_id, can_evaluate)

    @classmethod
    def by_agent_id(cls, episode: Episode) -> Self:
        """Access for a client that knows only the agent id."""
        return cls(episode, episode.spec.agent_id, can_evaluate=False)
