"""The runner of an episode: one task from start to end. Only it opens and removes sandboxes."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from decathlon_mcp.driver_client.driver import DriverClient
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.grading import WORKSPACE_FILE, EpisodeGrader, capture_workspace
from decathlon_mcp.episodes.keeping import keep_sealed
from decathlon_mcp.episodes.records import StoredEpisode
from decathlon_mcp.episodes.services import EpisodeResources, open_services, read_credentials
from decathlon_mcp.episodes.set_up import SEALED_FILE, SetUp
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.episodes.tool_changes import follow_tool_changes
from decathlon_mcp.episodes.tool_offer import ToolOffer
from decathlon_mcp.episodes.web import EpisodeWeb
from decathlon_mcp.errors import (
    CallTimeoutError,
    DecathlonError,
    DriverError,
    LimitExceededError,
    SandboxLostError,
)
from decathlon_mcp.grading.job import CapturedWorkspace
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.grading.verdict import REWARDED, Status, Verdict, verdict_without_grading
from decathlon_mcp.sandboxes.base import Sandbox, ended_from_inside
from decathlon_mcp.storage.store import SandboxRow
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.telemetry.metrics import RecoveryResult

log = logging.getLogger("decathlon.episodes")

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

    `stored`: what the store has of an episode that a dead server ran, which `Episode.restore` has got too.
    """

    def __init__(
        self,
        episode: Episode,
        *,
        admission: Admission,
        signer: Signer,
        scratch: Path,
        stored: StoredEpisode | None = None,
    ) -> None:
        self._episode = episode
        self._stored = stored
        self._recovery_is_counted = stored is None
        self._admission = admission
        self._signer = signer
        self._scratch = scratch / episode.spec.label
        self._offer = ToolOffer(episode, admission.starting_server)

    async def run(self) -> None:
        """Run from QUEUED to ENDED. Raises nothing but its own cancellation."""
        episode = self._episode
        # What stands if the runner is cancelled.
        ending, cause = Ending.SERVER_STOPPED, None
        if self._stored is None:
            log.info("episode started", extra=fields(episode=episode.spec.label, task=episode.task_name))
        try:
            # Outside the lease: when it expires, calls fail with their sandbox and know the reason.
            async with episode.running_calls():
                ending = await self._run()
        except DecathlonError as error:
            ending, cause = self._ending_for(error), error
        except Exception:
            ending = Ending.FAULT
            log.exception("episode failed", extra=fields(episode=episode.spec.label, task=episode.task_name))
        finally:
            self._count_recovery("ended")
            self._admission.release(episode.ticket)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(lambda: shutil.rmtree(self._scratch, ignore_errors=True))
                await self._end(ending, cause)

    def _count_recovery(self, result: RecoveryResult) -> None:
        """Count what became of an episode of a dead server, once."""
        if not self._recovery_is_counted:
            self._recovery_is_counted = True
            self._episode.metrics.recovered(result)

    def _ending_for(self, error: DecathlonError) -> Ending:
        if isinstance(error, SandboxLostError):
            return Ending.SANDBOX_LOST
        return Ending.NO_VERDICT if self._episode.was_ready else Ending.SET_UP_FAILED

    async def _run(self) -> Ending:
        episode = self._episode
        self._scratch.mkdir(mode=0o700, exist_ok=True)
        if self._stored is not None:
            await episode.restore_calls()
            if episode.claim is not None:
                episode.end_calls()
        if episode.verdict is None:
            with episode.lease.limit():
                if episode.claim is not None:
                    episode.lease.suspend()
                await self._offer.offer_early()
                async with self._admission.admit(episode.ticket):
                    self._record_verdict(await self._play())
        if episode.verdict is None:
            return episode.requested_ending or episode.lease.ending
        if episode.claim is None:
            # Its server died after it had recorded why there is no score.
            return episode.requested_ending or Ending.NOT_CONTINUED
        if episode.verdict.status not in REWARDED:
            return Ending.NO_VERDICT
        self._count_recovery("graded")
        if episode.state.phase is not Phase.SCORED:
            episode.mark_scored()
        if episode.requested_ending is None:
            with episode.lease.limit():
                await anyio.sleep_forever()
        return episode.requested_ending or Ending.SCORED

    async def _play(self) -> Verdict:
        """Open the agent's sandbox, wait for the claim, and grade; or continue with what was done before."""
        episode = self._episode
        if episode.state.phase is Phase.QUEUED:
            self._count_recovery("started_over")
            episode.mark_opening()
        if self._stored is not None and self._stored.obstacle is not None:
            raise SandboxLostError(f"the episode cannot be continued: {self._stored.obstacle}")
        async with AsyncExitStack() as stack:
            resources = await self._open_resources(stack)
            try:
                return await _with_web(await self._play_with(resources), resources)
            except DecathlonError as error:
                # Before the tools are ready, nothing of the agent can run.
                if not episode.was_ready or not may_be_the_agents_fault(error):
                    raise
                episode.close_attempt()
                if episode.claim is None:  # its lease has just expired
                    raise
                episode.end_calls()
                attempt = await anyio.to_thread.run_sync(episode.attempt)
                verdict = verdict_without_grading(attempt, status="forfeited", detail=error.message)
                return await _with_web(verdict, resources)

    async def _play_with(self, resources: EpisodeResources) -> Verdict:
        episode = self._episode
        grader = EpisodeGrader(episode, resources, self._admission)
        if episode.records.progress.captured:
            episode.require_whole_record()
            captured = CapturedWorkspace(self._scratch / WORKSPACE_FILE, self._sealed)
        else:
            # The agent's sandbox is removed before a grader's is opened, so that an episode never has two.
            async with resources.services.watched(), AsyncExitStack() as agent_stack:
                if episode.was_ready:
                    sandbox, driver = await self._take_back_agent_sandbox(agent_stack, resources)
                    # Now that it will be removed in any case.
                    episode.require_whole_record()
                else:
                    sandbox, driver = await self._open_agent_sandbox(agent_stack, resources)
                if driver is not None:
                    await self._wait_for_claim(driver)
                    if episode.spec.task.in_place:
                        return await grader.grade_in_place(sandbox, driver, self._sealed)
                async with self._admission.captures:
                    captured = await capture_workspace(episode, sandbox, driver, self._scratch, self._sealed)
                    episode.mark_captured()
                    await agent_stack.aclose()
        async with resources.services.watched():
            return await grader.grade_in_fresh_sandbox(captured)

    @property
    def _sealed(self) -> Path | None:
        """Archive of the task's folder as preprocess left it, once the episode is ready."""
        return self._scratch / SEALED_FILE if self._episode.records.progress.sealed else None

    async def _open_resources(self, stack: AsyncExitStack) -> EpisodeResources:
        """Open what all sandboxes of the episode share; it lives as long as the stack."""
        episode, factory = self._episode, self._episode.sandbox_factory
        task, label = episode.spec.task, episode.spec.label
        credentials = await read_credentials(factory, task, episode.ticket.accounts)
        start_seconds = episode.spec.limits.servers_seconds
        async with self._admission.set_ups:
            services = await stack.enter_async_context(
                open_services(
                    factory,
                    task,
                    label,
                    start_seconds=start_seconds,
                    records=episode.records,
                    taken_back=self._rows if episode.was_ready else None,
                )
            )
        web: EpisodeWeb | None = None
        if factory.web is not None and factory.uses_web(task):
            launch_time = episode.spec.launch_time
            web = await stack.enter_async_context(
                factory.web.episode(factory.suite, task, label, launch_time)
            )
        return EpisodeResources(services, credentials, web)

    @property
    def _rows(self) -> Mapping[str, SandboxRow]:
        """The sandboxes that the episode had when its server died, by name."""
        return {} if self._stored is None else {row.name: row for row in self._stored.sandboxes}

    async def _take_back_agent_sandbox(
        self, stack: AsyncExitStack, resources: EpisodeResources
    ) -> tuple[Sandbox, DriverClient | None]:
        """Continue the agent's sandbox of a dead server; an attempt that is open is READY afterwards.

        There is no driver if the sandbox was paused after the claim. Raises SandboxLostError.
        """
        episode, factory = self._episode, self._episode.sandbox_factory
        row = self._rows.get(episode.records.progress.agent or "")
        if row is None or self._stored is None or self._stored.tools is None:
            raise SandboxLostError("the agent's sandbox had been removed when its server died")
        async with self._admission.opening:
            sandbox, driver = await stack.enter_async_context(
                factory.take_back(
                    row,
                    episode.records,
                    forwards=resources.services.targets,
                    web=resources.web if factory.uses_web(episode.spec.task, "agent") else None,
                    unanswered=episode.unanswered_requests,
                )
            )
        if episode.claim is None:
            if driver is None:
                raise SandboxLostError("the agent's sandbox does not run any more")
            episode.become_ready(await self._offer.tool_session(sandbox, driver))
            self._count_recovery("continued")
            log.info("episode taken back", extra=fields(episode=episode.spec.label))
        return sandbox, driver

    async def _open_agent_sandbox(
        self, stack: AsyncExitStack, resources: EpisodeResources
    ) -> tuple[Sandbox, DriverClient]:
        """Open and set up the agent's sandbox; the episode is READY afterwards."""
        episode, factory = self._episode, self._episode.sandbox_factory
        task, agent_name = episode.spec.task, f"{episode.spec.label}-agent"
        set_up = SetUp(
            suite=factory.suite,
            task=task,
            launch_time=episode.spec.launch_time,
            common=factory.common,
            scratch=self._scratch,
            limits=episode.spec.limits,
            credentials=resources.credentials,
            isolated=factory.provider.isolation != "none",
            notes_original=episode.spec.keeps_workspace,
            before_reading=episode.read_revision,
        )
        first_name = f"{episode.spec.label}-preprocess" if set_up.has_two_sandboxes else agent_name
        if factory.root(first_name) != factory.root(agent_name):
            # Files that preprocess writes may contain absolute paths, so both sandboxes need the same root.
            # They can have the same name, as the first is removed before the second opens.
            first_name = agent_name

        @asynccontextmanager
        async def open_sandbox(name: str, image: str | None) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
            network, forwards = factory.network_for(task), resources.services.targets
            # Before it takes a place among the openings, which graders need to end other episodes.
            await self._admission.memory.wait()
            async with factory.open(
                name,
                network,
                image=image,
                forwards=forwards,
                records=episode.records,
                role="agent" if name == agent_name else "preprocess",
                # A task that is graded in place is graded in this sandbox.
                dense=name == agent_name and not task.in_place,
                opening=self._admission.opening,
                web=resources.web if factory.uses_web(task, "agent") else None,
            ) as (sandbox, driver):
                episode.mark_opened(sandbox.spec.name, sandbox.image_digest, dense=sandbox.spec.dense)
                yield sandbox, driver

        async with self._admission.set_ups:
            prepared = await set_up.run(
                stack,
                partial(open_sandbox, first_name),
                partial(open_sandbox, agent_name),
                self._offer.servers_to_start,
            )
            if prepared.preprocess_failure:
                episode.note_preprocess_failure(prepared.preprocess_failure)
            if episode.spec.keeps_workspace and prepared.sealed is not None:
                await keep_sealed(episode, prepared.sealed, prepared.original)
            await self._offer.complete(prepared)
            session = await self._offer.tool_session(
                prepared.sandbox, prepared.driver, running=prepared.servers
            )
        episode.mark_ready(session, sealed=prepared.sealed is not None)
        log.info(
            "episode ready",
            extra=fields(episode=episode.spec.label, seconds=round(time.time() - episode.started_at, 3)),
        )
        return prepared.sandbox, prepared.driver

    async def _wait_for_claim(self, driver: DriverClient) -> None:
        """Wait for the claim; meanwhile servers may start ahead of their first calls.

        Raises SandboxLostError if the sandbox is lost before. If a server cannot be started, it raises
        SandboxLostError too where no tool has been called, else the server's error.
        """
        episode, admission = self._episode, self._admission
        starts = episode.server_starts
        async with anyio.create_task_group() as tasks:
            driver.closed.on_set(tasks.cancel_scope.cancel)
            tasks.start_soon(follow_tool_changes, episode, driver)
            if starts is not None:
                starts.failed.on_set(tasks.cancel_scope.cancel)
                if episode.sandbox_factory.servers == "ahead":
                    names = episode.spec.task.needs.servers
                    tasks.start_soon(starts.start_ahead, names, admission.starts_ahead, admission.set_ups)
            await episode.state.reach(Phase.CLAIMED)
            tasks.cancel_scope.cancel()
        if episode.claim is not None:
            return
        if starts is None or starts.failure is None:
            raise await driver.closed_error()
        if episode.has_called:
            raise DriverError(starts.failure.message, **starts.failure.data)
        raise SandboxLostError(starts.failure.message)

    def _record_verdict(self, verdict: Verdict) -> None:
        self._episode.record_verdict(self._signer.sign(verdict))

    async def _end(self, ending: Ending, cause: DecathlonError | None) -> None:
        episode = self._episode
        try:
            if episode.verdict is None:
                detail = cause.message if cause is not None else str(ending)
                status = STATUS_WITHOUT_GRADING.get(ending, "not_evaluated")
                if status == "forfeited" and not episode.was_ready:
                    status = "not_evaluated"
                attempt = episode.attempt()
                if ending is Ending.TIME_OVER:
                    attempt = replace(attempt, truncated_by="time")
                self._record_verdict(verdict_without_grading(attempt, status=status, detail=detail))
        except Exception:
            log.exception("no verdict could be made", extra=fields(episode=episode.spec.label))
        finally:
            episode.mark_ended(ending, cause)
        # On stdio the client's user reads this log, so that it must not reveal a hidden reward.
        reward = {"reward": episode.verdict.reward} if episode.verdict and episode.policy == "visible" else {}
        log.info(
            "episode ended",
            extra=fields(
                episode=episode.spec.label,
                task=episode.task_name,
                ending=ending,
                calls=episode.calls,
                **reward,
                **({"cause": cause.message} if cause else {}),
            ),
        )


async def _with_web(verdict: Verdict, resources: EpisodeResources) -> Verdict:
    """The verdict with how the requests to the recorded web were answered."""
    if resources.web is None:
        return verdict
    return verdict.model_copy(update={"web": await resources.web.use()})


def may_be_the_agents_fault(error: DecathlonError) -> bool:
    """Whether the agent may have caused this failure of its sandbox or of a service, once it could play.

    It can exhaust their memory and processes, keep the driver from answering or break it, and write more than
    the workspace's limit. It cannot end the engine.
    """
    if isinstance(error, SandboxLostError):
        return ended_from_inside(error)
    return isinstance(error, CallTimeoutError | DriverError | LimitExceededError)
