"""The runner of an episode: one task from start to end. Only it opens and removes sandboxes."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from decathlon_mcp.background import in_any_case, run_alone
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.beginnings import (
    SEALED_FILE,
    AgentSandbox,
    EpisodeHooks,
    EpisodeResources,
    Start,
    open_resources,
)
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.grading import (
    WORKSPACE_FILE,
    EpisodeGrader,
    attempt_of,
    capture_workspace,
    require_whole_record,
    with_room,
)
from decathlon_mcp.episodes.set_up import set_up
from decathlon_mcp.episodes.specification import Claim
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.episodes.tools.offer import ToolOffer
from decathlon_mcp.errors import (
    DecathlonError,
    DiskFullError,
    DriverError,
    EpisodeEndedError,
    SandboxLostError,
)
from decathlon_mcp.grading.fault import AgentsFaultError, FaultFinder, fault_by_evidence
from decathlon_mcp.grading.inputs import CapturedWorkspace
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.grading.verdict import REWARDED, Status, Verdict, verdict_without_grading
from decathlon_mcp.storage.disk import is_full
from decathlon_mcp.storage.kept_tools import KeptTools
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.episodes")

REMOVAL_SECONDS = 10.0
"""How long the end of an episode waits for the removal of its archives, which usually takes milliseconds."""
STATUS_WITHOUT_GRADING: dict[Ending, Status] = {
    Ending.SANDBOX_LOST: "sandbox_lost",
    Ending.SET_UP_FAILED: "set_up_failed",
    Ending.TIME_OVER: "forfeited",
}
"""Status of the verdict of an episode that was not graded; `not_evaluated` for every other ending."""
# An agent can let its time pass, with a call that takes hours. An idle lease expires because its client sent
# nothing; that is not the agent's doing.


class EpisodeRunner:
    """Runs one episode. An error ends this episode only; a cancelled runner leaves nothing behind.

    `hooks`: the links by which it can begin, and what hangs on it while its agent acts. `around`: what is
    entered before anything is done. `folder_of`: see `Start`.
    """

    def __init__(
        self,
        episode: Episode,
        *,
        admission: Admission,
        signer: Signer,
        scratch: Path,
        kept_tools: KeptTools,
        hooks: Sequence[EpisodeHooks] = (),
        folder_of: Callable[[str], Path | None] = lambda public_id: None,
        around: AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        self._episode = episode
        self._admission = admission
        self._signer = signer
        self._scratch = scratch / episode.public_id
        self._hooks = hooks
        self._folder_of = folder_of
        self._around = around or nullcontext()
        # Then the sandbox is paused: the driver does not answer any more.
        self._capture_was_tried = False
        self._offer = ToolOffer(episode, kept_tools, admission.starting_server)

    async def run(self) -> None:
        """Run from QUEUED to ENDED. Raises nothing but its own cancellation."""
        episode = self._episode
        # What stands if the runner is cancelled.
        ending, cause = Ending.SERVER_STOPPED, None
        try:
            # Outside the lease: when it expires, calls fail with their sandbox and know the reason.
            async with episode.calls.running(), self._around:
                ending = await self._run()
        except DecathlonError as error:
            cause = error
            ending = Ending.NO_VERDICT if episode.was_ready else Ending.SET_UP_FAILED
            if isinstance(error, SandboxLostError):
                ending = Ending.SANDBOX_LOST
        except Exception:
            ending = Ending.FAULT
            log.exception(
                "episode failed", extra=fields(episode=episode.public_id, task=episode.spec.task_name)
            )
        finally:
            in_any_case(lambda: self._admission.release(episode.ticket))
            # Whatever raised before the state moved has left an episode that never ended, and its clients
            # waiting. So has a thread that nothing gave: all of them can be busy.
            try:
                with anyio.move_on_after(REMOVAL_SECONDS, shield=True):
                    await run_alone(self._remove_scratch)
            finally:
                self._end(ending, cause)

    async def _run(self) -> Ending:
        """Wait for admission, play, and stay until the client closes the episode or its lease expires."""
        episode = self._episode
        await with_room(episode, self._make_scratch)
        if episode.verdict is None:
            # Neither the lease nor `close` may interrupt a grading.
            with episode.lease.limit() if episode.claim is None else nullcontext():
                await self._offer.offer_early()
                async with self._admission.admit(episode.ticket):
                    episode.record_verdict(self._signer.sign(await self._play()))
        if episode.verdict is None:
            return episode.records.progress.requested_ending or episode.lease.ending
        if episode.claim is None:
            # Its server died after it had recorded why there is no score.
            return episode.records.progress.requested_ending or Ending.NOT_CONTINUED
        if episode.verdict.status not in REWARDED:
            return Ending.NO_VERDICT
        if episode.state.phase is not Phase.SCORED:
            episode.records.update(Phase.SCORED)
            episode.state.move(Phase.SCORED)
        if episode.records.progress.requested_ending is None:
            with episode.lease.limit():
                await anyio.sleep_forever()
        requested = episode.records.progress.requested_ending
        # A client that leaves now has not left before the grading.
        return Ending.SCORED if requested in (None, Ending.CLOSED) else requested

    async def _play(self) -> Verdict:
        """Open the agent's sandbox, wait for the claim, and grade; or continue with what was done before."""
        episode = self._episode
        if episode.state.phase is Phase.QUEUED:
            episode.mark_opening()
        async with AsyncExitStack() as stack:
            resources = await stack.enter_async_context(open_resources(episode, self._admission))
            try:
                return await resources.reported(await self._play_with(resources))
            except DecathlonError as error:
                # Before the tools are ready, nothing of the agent can run.
                fault = fault_by_evidence(error)
                if not episode.was_ready or fault is None or not fault.is_agents:
                    raise
                # An attempt that a dead server left open is open, also if its sandbox cannot be taken back.
                if episode.state.phase is Phase.OPENING:
                    episode.state.move(Phase.READY)
                episode.accept_claim(Claim(by_agent=False))
                if episode.claim is None:  # its lease has just expired
                    raise
                episode.calls.end()
                attempt = await anyio.to_thread.run_sync(attempt_of, episode)
                is_decided = isinstance(error, AgentsFaultError)
                detail = error.message if is_decided else f"{error.message} ({fault.rule})"
                verdict = verdict_without_grading(attempt, status="forfeited", detail=detail)
                return await resources.reported(verdict)

    async def _play_with(self, resources: EpisodeResources) -> Verdict:
        """From the agent's sandbox to the verdict, which a fresh sandbox or the agent's own gives."""
        episode = self._episode
        grader = EpisodeGrader(episode, resources, self._admission, self._hooks)
        if episode.records.progress.captured:
            factory = episode.sandbox_factory
            location = factory.agent_root(episode.public_id) / factory.suite.profile.workspace
            captured = CapturedWorkspace(
                self._scratch / WORKSPACE_FILE, self._task_folder_archive, location=location
            )
        else:
            # The agent's sandbox is removed before a grader's is opened, so that an episode never has two.
            async with resources.watched(), AsyncExitStack() as agent_stack:
                start = Start(
                    episode=episode,
                    resources=resources,
                    admission=self._admission,
                    offer=self._offer,
                    scratch=self._scratch,
                    folder_of=self._folder_of,
                    stack=agent_stack,
                )
                agent = await self._begin(start)
                if agent.driver is not None:
                    async with AsyncExitStack() as acting:
                        for hooks in self._hooks:
                            await acting.enter_async_context(hooks.acting(start, agent))
                        async with self._fault_finder.deciding(agent.sandbox):
                            await self._wait_for_claim(agent)
                    require_whole_record(episode)
                    if episode.spec.task.in_place:
                        return await grader.grade_in_place(
                            agent.sandbox, agent.driver, self._task_folder_archive
                        )
                capture = partial(self._capture, agent_stack, agent)
                captured = await with_room(episode, capture, agent.sandbox)
        require_whole_record(episode)
        async with resources.watched():
            return await grader.grade_in_fresh_sandbox(captured)

    async def _begin(self, start: Start) -> AgentSandbox:
        """Begin the episode by the first link that can. It is READY then, unless its attempt is closed."""
        episode, hooks = self._episode, self._hooks
        if not episode.was_ready:
            require_whole_record(episode)

        async def after(count: int) -> AgentSandbox:
            if count == len(hooks):
                return await set_up(start)
            return await hooks[count].begin(start, partial(after, count + 1))

        agent = await after(0)
        if not episode.was_ready:
            episode.mark_ready(agent.open_session, sealed=agent.sealed, tools=agent.tools)
            log.info(
                "episode ready",
                extra=fields(episode=episode.public_id, seconds=round(time.time() - episode.started_at, 3)),
            )
        return agent

    async def _wait_for_claim(self, agent: AgentSandbox) -> None:
        """Wait for the claim; meanwhile servers may start ahead of their first calls.

        Raises SandboxLostError if the sandbox is lost before. If a server cannot be started, it raises
        SandboxLostError too where no tool has been called, else the server's error.
        """
        episode, admission, driver = self._episode, self._admission, agent.driver
        starts = None if agent.session is None else agent.session.starts
        assert driver is not None
        async with anyio.create_task_group() as tasks:
            driver.closed.on_set(tasks.cancel_scope.cancel)
            if starts is not None:
                starts.failed.on_set(tasks.cancel_scope.cancel)
                if episode.sandbox_factory.servers == "ahead":
                    names = episode.spec.task.needs.servers
                    tasks.start_soon(
                        starts.start_ahead,
                        names,
                        episode.calls.known.idle,
                        admission.starts_ahead,
                        admission.set_ups,
                    )
            await episode.state.reach(Phase.CLAIMED)
            tasks.cancel_scope.cancel()
        if episode.claim is not None:
            return
        if starts is None or starts.failure is None:
            raise await driver.closed_error()
        if episode.calls.sent:
            raise DriverError(starts.failure.message, **starts.failure.data)
        raise SandboxLostError(starts.failure.message)

    async def _make_scratch(self) -> None:
        try:
            self._scratch.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            if is_full(error):
                raise DiskFullError(f"the server's disk cannot be written: {error.strerror}") from error
            raise

    async def _remove_scratch(self) -> None:
        remove = partial(shutil.rmtree, self._scratch, ignore_errors=True)
        await anyio.to_thread.run_sync(remove, abandon_on_cancel=True)

    def _end(self, ending: Ending, cause: DecathlonError | None) -> None:
        episode = self._episode
        reason = episode.records.progress.closing_reason
        if ending is Ending.CLOSED and episode.verdict is None and reason:
            cause = EpisodeEndedError(reason, reason=str(ending))
        try:
            if episode.verdict is None:
                detail = cause.message if cause is not None else str(ending)
                status = STATUS_WITHOUT_GRADING.get(ending, "not_evaluated")
                if status == "forfeited" and not episode.was_ready:
                    status = "not_evaluated"
                attempt = attempt_of(episode)
                if ending is Ending.TIME_OVER:
                    attempt = replace(attempt, truncated_by="time")
                verdict = verdict_without_grading(attempt, status=status, detail=detail)
                episode.record_verdict(self._signer.sign(verdict))
        except Exception:
            log.exception("no verdict could be made", extra=fields(episode=episode.public_id))
        finally:
            episode.mark_ended(ending, cause)
        # On stdio the client's user reads this log, so that it must not reveal a hidden reward.
        is_shown = episode.verdict is not None and episode.spec.policy == "visible"
        reward = {"reward": episode.verdict.reward} if is_shown and episode.verdict else {}
        log.info(
            "episode ended",
            extra=fields(
                episode=episode.public_id,
                task=episode.spec.task_name,
                ending=ending,
                calls=episode.calls.sent,
                **reward,
                **({"cause": cause.message} if cause else {}),
            ),
        )

    async def _capture(self, agent_stack: AsyncExitStack, agent: AgentSandbox) -> CapturedWorkspace:
        """Capture the agent's workspace, and remove its sandbox. Raises as `capture_workspace`."""
        async with self._admission.captures:
            is_first, self._capture_was_tried = not self._capture_was_tried, True
            async with self._fault_finder.deciding(agent.sandbox):
                captured = await capture_workspace(
                    self._episode,
                    agent.sandbox,
                    agent.driver if is_first else None,
                    self._scratch,
                    self._task_folder_archive,
                    measures=is_first,
                )
            self._fault_finder.health.note_success(self._episode.public_id)
            self._episode.note(captured=True)
            await agent_stack.aclose()
        return captured

    @property
    def _fault_finder(self) -> FaultFinder:
        return self._episode.sandbox_factory.fault_finder(self._episode.public_id)

    @property
    def _task_folder_archive(self) -> Path | None:
        """Archive of the task's folder as preprocess left it, once the episode is ready."""
        return self._scratch / SEALED_FILE if self._episode.records.progress.sealed else None
