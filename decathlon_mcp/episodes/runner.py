"""The runner of an episode: one task from start to end. Only it opens and removes sandboxes."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from decathlon_mcp.background import in_any_case, run_alone
from decathlon_mcp.catalogue.catalogue import SuiteRevision
from decathlon_mcp.driver_client.driver import DriverClient
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.branching import play_again
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.grading import (
    WORKSPACE_FILE,
    EpisodeGrader,
    attempt_of,
    capture_workspace,
    keep_sealed,
    read_original,
    require_whole_record,
    with_room,
)
from decathlon_mcp.episodes.records import StoredEpisode
from decathlon_mcp.episodes.sandbox_factory import agent_sandbox
from decathlon_mcp.episodes.services import EpisodeResources, open_services, read_credentials
from decathlon_mcp.episodes.set_up import SEALED_FILE, PreparedTask, SetUp
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.episodes.task_states import TaskStates, Turn
from decathlon_mcp.episodes.tools.offer import ToolOffer, follow_tool_changes
from decathlon_mcp.episodes.tools.offered import OfferedTools
from decathlon_mcp.episodes.tools.session import ServerStarts, ToolSession
from decathlon_mcp.episodes.web import EpisodeWeb
from decathlon_mcp.errors import (
    CallTimeoutError,
    DecathlonError,
    DiskFullError,
    DriverError,
    SandboxLostError,
    SnapshotError,
)
from decathlon_mcp.grading.fault import AgentsFaultError, FaultFinder, fault_by_evidence
from decathlon_mcp.grading.job import CapturedWorkspace
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.grading.verdict import REWARDED, Status, Verdict, verdict_without_grading
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.storage.disk import is_full
from decathlon_mcp.storage.kept_tools import KeptTools
from decathlon_mcp.storage.snapshots import SavedState, discard, nearest_state
from decathlon_mcp.storage.store import SandboxRow
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.telemetry.metrics import RecoveryResult

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


@dataclass(frozen=True, slots=True)
class _Begun:
    """An agent's sandbox that is set up, with the tools that it offers.

    `tools`: their digest, see `KeptTools`. `sealed`: whether there is an archive of the task's folder. `at`:
    the call after which the sandbox stands.
    """

    sandbox: Sandbox
    driver: DriverClient
    session: ToolSession
    tools: str
    sealed: bool
    at: int = 0


class EpisodeRunner:
    """Runs one episode. An error ends this episode only; a cancelled runner leaves nothing behind.

    `stored`: what the store has of an episode that a dead server ran, which `Episode.restore` has got too.
    `source`: the folder of the episode that this one branches from. `task_states`: tasks that other
    episodes have set up.
    """

    def __init__(
        self,
        episode: Episode,
        *,
        admission: Admission,
        signer: Signer,
        scratch: Path,
        kept_tools: KeptTools,
        task_states: TaskStates,
        stored: StoredEpisode | None = None,
        source: Path | None = None,
    ) -> None:
        self._episode = episode
        self._stored = stored
        self._source = source
        self._recovery_is_counted = stored is None
        self._admission = admission
        self._signer = signer
        self._kept_tools = kept_tools
        self._task_states = task_states
        self._scratch = scratch / episode.public_id
        # Then the sandbox is paused: the driver does not answer any more.
        self._capture_was_tried = False
        self._offer = ToolOffer(episode, admission.starting_server)
        self._starts: ServerStarts | None = None
        """What starts the task's servers, once the episode is ready."""

    async def run(self) -> None:
        """Run from QUEUED to ENDED. Raises nothing but its own cancellation."""
        episode = self._episode
        # What stands if the runner is cancelled.
        ending, cause = Ending.SERVER_STOPPED, None
        if self._stored is None:
            log.info("episode started", extra=fields(episode=episode.public_id, task=episode.task_name))
        try:
            # Outside the lease: when it expires, calls fail with their sandbox and know the reason.
            async with episode.calls.running():
                ending = await self._run()
        except DecathlonError as error:
            ending, cause = self._ending_for(error), error
        except Exception:
            ending = Ending.FAULT
            log.exception("episode failed", extra=fields(episode=episode.public_id, task=episode.task_name))
        finally:
            in_any_case(
                lambda: self._count_recovery("ended"), lambda: self._admission.release(episode.ticket)
            )
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
        if self._stored is not None:
            await self._restore(self._stored)
        await with_room(episode, self._make_scratch)
        if episode.verdict is None:
            # Neither the lease nor `close` may interrupt a grading.
            with episode.lease.limit() if episode.claim is None else nullcontext():
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

    async def _restore(self, stored: StoredEpisode) -> None:
        """Read the calls of the dead server. Raises SandboxLostError if the episode cannot be continued."""
        episode, obstacle = self._episode, stored.obstacle
        try:
            await episode.calls.restore(starts_over=not episode.was_ready)
        except OSError as error:
            obstacle = obstacle or f"its trajectory cannot be read: {error.strerror}"
        if obstacle is not None and episode.verdict is None and not stored.is_closed:
            raise SandboxLostError(f"the episode cannot be continued: {obstacle}")
        if episode.claim is not None:
            episode.calls.close()

    async def _play(self) -> Verdict:
        """Open the agent's sandbox, wait for the claim, and grade; or continue with what was done before."""
        episode = self._episode
        if episode.state.phase is Phase.QUEUED:
            self._count_recovery("started_over")
            episode.mark_opening()
        async with AsyncExitStack() as stack:
            resources = await self._open_resources(stack)
            try:
                return await _with_web(await self._play_with(resources), resources)
            except DecathlonError as error:
                # Before the tools are ready, nothing of the agent can run.
                fault = fault_by_evidence(error)
                if not episode.was_ready or fault is None or not fault.is_agents:
                    raise
                episode.close_attempt()
                if episode.claim is None:  # its lease has just expired
                    raise
                episode.calls.close()
                attempt = await anyio.to_thread.run_sync(attempt_of, episode)
                is_decided = isinstance(error, AgentsFaultError)
                detail = error.message if is_decided else f"{error.message} ({fault.rule})"
                verdict = verdict_without_grading(attempt, status="forfeited", detail=detail)
                return await _with_web(verdict, resources)

    async def _play_with(self, resources: EpisodeResources) -> Verdict:
        """From the agent's sandbox to the verdict, which a fresh sandbox or the agent's own gives."""
        episode = self._episode
        grader = EpisodeGrader(episode, resources, self._admission)
        if episode.records.progress.captured:
            captured = CapturedWorkspace(self._scratch / WORKSPACE_FILE, self._sealed)
        else:
            # The agent's sandbox is removed before a grader's is opened, so that an episode never has two.
            async with resources.services.watched(), AsyncExitStack() as agent_stack:
                if episode.was_ready:
                    sandbox, driver = await self._take_back_agent_sandbox(agent_stack, resources)
                else:
                    require_whole_record(episode)
                    sandbox, driver = await self._open_agent_sandbox(agent_stack, resources)
                if driver is not None:
                    async with (
                        episode.snapshots.saving(sandbox, driver, self._sealed),
                        self._fault_finder.deciding(sandbox),
                    ):
                        await self._wait_for_claim(driver)
                    require_whole_record(episode)
                    if episode.spec.task.in_place:
                        return await grader.grade_in_place(sandbox, driver, self._sealed)
                captured = await with_room(episode, partial(self._capture, agent_stack, sandbox, driver))
        require_whole_record(episode)
        async with resources.services.watched():
            return await grader.grade_in_fresh_sandbox(captured)

    async def _open_resources(self, stack: AsyncExitStack) -> EpisodeResources:
        """Open what all sandboxes of the episode share; it lives as long as the stack."""
        episode, factory = self._episode, self._episode.sandbox_factory
        task, public_id = episode.spec.task, episode.public_id
        credentials = await read_credentials(factory, task, episode.ticket.accounts)
        start_seconds = episode.spec.limits.servers_seconds
        async with self._admission.set_ups:
            services = await stack.enter_async_context(
                open_services(
                    factory,
                    task,
                    public_id,
                    start_seconds=start_seconds,
                    records=episode.sandbox_records,
                    taken_back=self._rows if episode.was_ready else None,
                )
            )
        web: EpisodeWeb | None = None
        if factory.web is not None and factory.uses_web(task):
            launch_time = episode.spec.launch_time
            web = await stack.enter_async_context(
                factory.web.episode(factory.suite, task, public_id, launch_time)
            )
        return EpisodeResources(services, credentials, web)

    async def _open_agent_sandbox(
        self, stack: AsyncExitStack, resources: EpisodeResources
    ) -> tuple[Sandbox, DriverClient]:
        """Open and set up the agent's sandbox, and offer its tools; the episode is READY afterwards."""
        episode, branch = self._episode, self._episode.spec.branch
        begun = await self._begin(stack, resources)
        if branch is not None:
            await play_again(episode, branch, begun.session, self._source, copied=begun.at)
        episode.mark_ready(begun.session, sealed=begun.sealed, tools=begun.tools)
        self._starts = begun.session.starts
        log.info(
            "episode ready",
            extra=fields(episode=episode.public_id, seconds=round(time.time() - episode.started_at, 3)),
        )
        return begun.sandbox, begun.driver

    async def _begin(self, stack: AsyncExitStack, resources: EpisodeResources) -> _Begun:
        """Open the agent's sandbox on `stack` as a copy of what another episode has saved, or set it up."""
        branch = self._episode.spec.branch
        if branch is not None and self._source is not None:
            state = await anyio.to_thread.run_sync(nearest_state, self._source, branch.at)
            if state is not None:
                exact = state.at == branch.at
                if (begun := await self._begin_as_copy(stack, resources, state, exact=exact)) is not None:
                    return begun
        async with self._task_states.turn(self._episode, resources.credentials) as turn:
            if turn.found is not None:
                begun = await self._begin_as_copy(stack, resources, turn.found, prepared=True)
                if begun is not None:
                    return begun
            async with self._admission.set_ups:
                return await self._begin_with_set_up(stack, resources, turn)

    async def _begin_with_set_up(
        self, stack: AsyncExitStack, resources: EpisodeResources, turn: Turn
    ) -> _Begun:
        episode = self._episode
        prepared = await self._set_up(stack, resources)
        sandbox, driver = prepared.sandbox, prepared.driver
        if prepared.preprocess_failure:
            log.warning(
                "preprocess failed, which its suite ignores",
                extra=fields(
                    episode=episode.public_id,
                    task=episode.task_name,
                    why=prepared.preprocess_failure,
                ),
            )
            episode.note_preprocess_failure(prepared.preprocess_failure)
        if episode.spec.keeps_workspace and prepared.sealed is not None:
            await keep_sealed(episode, prepared.sealed, prepared.original)
        tools = await self._offer.complete(prepared, self._kept_tools)
        session = await self._offer.tool_session(sandbox, driver, running=prepared.servers)
        await self._task_states.save(turn, episode, prepared, session)
        return _Begun(sandbox, driver, session, tools, sealed=prepared.sealed is not None)

    async def _begin_as_copy(
        self,
        stack: AsyncExitStack,
        resources: EpisodeResources,
        state: SavedState,
        *,
        exact: bool = False,
        prepared: bool = False,
    ) -> _Begun | None:
        """Open a copy of another episode's sandbox on `stack`, and offer its tools.

        None if that is not possible. `exact`, `prepared`: see `Progress`.
        """
        episode = self._episode
        try:
            async with self._admission.set_ups, AsyncExitStack() as opened:
                sandbox, driver = await opened.enter_async_context(
                    self._open_sandbox(resources, self._agent_name, None, state)
                )
                if state.sealed:
                    await self._copy_sealed(state)
                tools = await self._offer.copy(OfferedTools.from_json(state.tools), self._kept_tools)
                episode.note_copy(state.progress, exact=exact, prepared=prepared)
                await stack.enter_async_context(opened.pop_all())
        except (SnapshotError, SandboxLostError, CallTimeoutError, OSError, ValueError, KeyError) as error:
            why = error.message if isinstance(error, DecathlonError) else str(error)
            log.warning(
                "a saved state cannot be used: the set-up and the calls after it are made again",
                extra=fields(episode=episode.public_id, at=state.at, why=why),
            )
            # Others would wait for it in vain.
            await anyio.to_thread.run_sync(discard, state)
            return None
        episode.metrics.copied()
        session = await self._offer.tool_session(sandbox, driver)
        return _Begun(sandbox, driver, session, tools, sealed=state.sealed, at=state.at)

    async def _copy_sealed(self, state: SavedState) -> None:
        """Copy the task's folder as preprocess left it. Raises OSError, ValueError."""
        sealed = self._scratch / SEALED_FILE
        await anyio.to_thread.run_sync(shutil.copyfile, state.sealed_file, sealed)
        if self._episode.spec.keeps_workspace:
            await keep_sealed(self._episode, sealed, await read_original(state.owner))

    async def _set_up(self, stack: AsyncExitStack, resources: EpisodeResources) -> PreparedTask:
        """Open the agent's sandbox on `stack` and set it up."""
        episode, factory = self._episode, self._episode.sandbox_factory
        set_up = SetUp(
            suite=factory.suite,
            task=episode.spec.task,
            launch_time=episode.spec.launch_time,
            common=factory.common,
            scratch=self._scratch,
            limits=episode.spec.limits,
            credentials=resources.credentials,
            isolated=factory.provider.isolation != "none",
            notes_original=episode.spec.keeps_workspace,
            before_reading=self._read_revision,
        )
        first = f"{episode.public_id}-preprocess" if set_up.has_two_sandboxes else self._agent_name
        if factory.root(first) != factory.root(self._agent_name):
            # Files that preprocess writes may contain absolute paths, so both sandboxes need the same root.
            # They can have the same name, as the first is removed before the second opens.
            first = self._agent_name
        return await set_up.run(
            stack,
            partial(self._open_sandbox, resources, first),
            partial(self._open_sandbox, resources, self._agent_name),
            self._offer.servers_to_start,
        )

    @asynccontextmanager
    async def _open_sandbox(
        self, resources: EpisodeResources, name: str, image: str | None, state: SavedState | None = None
    ) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
        """Open the sandbox of preprocess or of the agent, as `SetUp.run` asks for it.

        `state`: what the agent's is a copy of.
        """
        episode, factory, task = self._episode, self._episode.sandbox_factory, self._episode.spec.task
        is_agents = name == self._agent_name
        # Before it takes a place among the openings, which graders need to end other episodes.
        await self._admission.memory.wait()
        async with factory.open(
            name,
            factory.network_for(task),
            image=image,
            forwards=resources.services.targets,
            records=episode.sandbox_records,
            role="agent" if is_agents else "preprocess",
            # A task that is graded in place is graded in this sandbox.
            dense=is_agents and not task.in_place,
            opening=self._admission.opening,
            web=resources.web if factory.uses_web(task, "agent") else None,
            state=state,
        ) as (sandbox, driver):
            episode.mark_opened(sandbox.spec.name, sandbox.image_digest, dense=sandbox.spec.dense)
            yield sandbox, driver

    def _read_revision(self) -> None:
        """Note the revision of the files that the set-up is about to read. Blocks."""
        episode, factory = self._episode, self._episode.sandbox_factory
        episode.note_revision(SuiteRevision.read(factory.suite, episode.spec.task, factory.common_digest))

    async def _wait_for_claim(self, driver: DriverClient) -> None:
        """Wait for the claim; meanwhile servers may start ahead of their first calls.

        Raises SandboxLostError if the sandbox is lost before. If a server cannot be started, it raises
        SandboxLostError too where no tool has been called, else the server's error.
        """
        episode, admission, starts = self._episode, self._admission, self._starts
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
        if episode.calls.sent:
            raise DriverError(starts.failure.message, **starts.failure.data)
        raise SandboxLostError(starts.failure.message)

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
                    episode.sandbox_records,
                    forwards=resources.services.targets,
                    web=resources.web if factory.uses_web(episode.spec.task, "agent") else None,
                    unanswered=episode.calls.unanswered_requests,
                )
            )
        # Now that the sandbox will be removed in any case, and before a call is sent to it.
        require_whole_record(episode)
        if episode.claim is None:
            if driver is None:
                raise SandboxLostError("the agent's sandbox does not run any more")
            session = await self._offer.tool_session(sandbox, driver)
            episode.become_ready(session)
            self._starts = session.starts
            self._count_recovery("continued")
            log.info("episode taken back", extra=fields(episode=episode.public_id))
        return sandbox, driver

    def _record_verdict(self, verdict: Verdict) -> None:
        self._episode.record_verdict(self._signer.sign(verdict))

    def _ending_for(self, error: DecathlonError) -> Ending:
        if isinstance(error, SandboxLostError):
            return Ending.SANDBOX_LOST
        return Ending.NO_VERDICT if self._episode.was_ready else Ending.SET_UP_FAILED

    async def _make_scratch(self) -> None:
        try:
            self._scratch.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            if is_full(error):
                raise DiskFullError(f"the server's disk cannot be written: {error.strerror}") from error
            raise

    async def _remove_scratch(self) -> None:
        await anyio.to_thread.run_sync(
            lambda: shutil.rmtree(self._scratch, ignore_errors=True), abandon_on_cancel=True
        )

    def _end(self, ending: Ending, cause: DecathlonError | None) -> None:
        episode = self._episode
        try:
            if episode.verdict is None:
                detail = cause.message if cause is not None else str(ending)
                status = STATUS_WITHOUT_GRADING.get(ending, "not_evaluated")
                if status == "forfeited" and not episode.was_ready:
                    status = "not_evaluated"
                attempt = attempt_of(episode)
                if ending is Ending.TIME_OVER:
                    attempt = replace(attempt, truncated_by="time")
                self._record_verdict(verdict_without_grading(attempt, status=status, detail=detail))
        except Exception:
            log.exception("no verdict could be made", extra=fields(episode=episode.public_id))
        finally:
            episode.mark_ended(ending, cause)
        # On stdio the client's user reads this log, so that it must not reveal a hidden reward.
        reward = (
            {"reward": episode.verdict.reward} if episode.verdict and episode.spec.policy == "visible" else {}
        )
        log.info(
            "episode ended",
            extra=fields(
                episode=episode.public_id,
                task=episode.task_name,
                ending=ending,
                calls=episode.calls.sent,
                **reward,
                **({"cause": cause.message} if cause else {}),
            ),
        )

    async def _capture(
        self, agent_stack: AsyncExitStack, sandbox: Sandbox, driver: DriverClient | None
    ) -> CapturedWorkspace:
        """Capture the agent's workspace, and remove its sandbox. Raises as `capture_workspace`."""
        async with self._admission.captures:
            if self._capture_was_tried:
                driver = None
            self._capture_was_tried = True
            async with self._fault_finder.deciding(sandbox):
                captured = await capture_workspace(
                    self._episode, sandbox, driver, self._scratch, self._sealed
                )
            self._fault_finder.health.note_success(self._episode.public_id)
            self._episode.mark_captured()
            await agent_stack.aclose()
        return captured

    def _count_recovery(self, result: RecoveryResult) -> None:
        """Count what became of an episode of a dead server, once."""
        if not self._recovery_is_counted:
            self._recovery_is_counted = True
            self._episode.metrics.recovered(result)

    @property
    def _fault_finder(self) -> FaultFinder:
        return self._episode.sandbox_factory.fault_finder(self._episode.public_id)

    @property
    def _agent_name(self) -> str:
        return agent_sandbox(self._episode.public_id)

    @property
    def _rows(self) -> Mapping[str, SandboxRow]:
        """The sandboxes that the episode had when its server died, by name."""
        return {} if self._stored is None else {row.name: row for row in self._stored.sandboxes}

    @property
    def _sealed(self) -> Path | None:
        """Archive of the task's folder as preprocess left it, once the episode is ready."""
        return self._scratch / SEALED_FILE if self._episode.records.progress.sealed else None


async def _with_web(verdict: Verdict, resources: EpisodeResources) -> Verdict:
    """The verdict with how the requests to the recorded web were answered."""
    if resources.web is None:
        return verdict
    return verdict.model_copy(update={"web": await resources.web.use()})
