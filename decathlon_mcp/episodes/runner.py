"""The owner of an episode: one task from birth to end. Sandboxes are opened and removed here alone."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import anyio
import anyio.to_thread

from decathlon_mcp.driver_client.driver import DriverClient, ServerInfo
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.episode import Episode, ToolSession
from decathlon_mcp.episodes.grading import EpisodeResources, Grading, attempt_of
from decathlon_mcp.episodes.set_up import Deadlines, SetUp
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.episodes.tools import Calls, ToolRouter
from decathlon_mcp.errors import DecathlonError, LimitExceededError, SandboxLostError, SetUpError
from decathlon_mcp.grading.job import CapturedWorkspace
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.grading.verdict import Status, Verdict, verdict_without_grading
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.settings import Settings
from decathlon_mcp.suites.local_tools import local_spec
from decathlon_mcp.suites.tool_names import LOCAL
from decathlon_mcp.suites.truncation import without_output_schemas
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.episodes")

_STATUS: dict[Ending, Status] = {Ending.SANDBOX_LOST: "sandbox_lost", Ending.SET_UP_FAILED: "set_up_failed"}
"""What the verdict says of an episode that ended without being graded; else `not_evaluated`."""


class EpisodeRunner:
    """Runs one episode. `run` never raises but when it is cancelled, and then nothing is left either."""

    def __init__(
        self, episode: Episode, *, admission: Admission, settings: Settings, signer: Signer, scratch: Path
    ) -> None:
        self._episode = episode
        self._admission = admission
        self._settings = settings
        self._signer = signer
        self._scratch = scratch / episode.label

    async def run(self) -> None:
        """From QUEUED to ENDED."""
        episode = self._episode
        ending, cause = Ending.SERVER_STOPPED, None
        log.info("episode started", extra=fields(episode=episode.label, task=episode.task_name))
        try:
            ending = await self._run()
        except DecathlonError as error:
            cause = error
            opened = episode.tool_session is not None
            lost = isinstance(error, SandboxLostError)
            ending = Ending.SANDBOX_LOST if lost else Ending.NO_VERDICT if opened else Ending.SET_UP_FAILED
        except Exception:
            ending = Ending.FAULT
            log.exception("episode failed", extra=fields(episode=episode.label, task=episode.task_name))
        finally:
            self._admission.give_back(episode.ticket)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(lambda: shutil.rmtree(self._scratch, ignore_errors=True))
                await self._end(ending, cause)

    async def _run(self) -> Ending:
        episode = self._episode
        self._scratch.mkdir(mode=0o700)
        async with AsyncExitStack() as place:
            with episode.lease.limit():
                await place.enter_async_context(self._admission.place(episode.ticket))
                episode.lease.begin()
                self._settle(await self._play())
        if episode.verdict is None:
            return episode.left or (Ending.TIME_OVER if episode.lease.over else Ending.LEASE_EXPIRED)
        if episode.verdict.status != "scored":
            return Ending.NO_VERDICT
        episode.state.move(Phase.SCORED)
        if episode.left is None:
            with episode.lease.limit():
                await anyio.sleep_forever()
        return episode.left or Ending.SCORED

    def _settle(self, verdict: Verdict) -> None:
        self._episode.verdict = verdict = self._signer.sign(verdict)
        self._episode.journal.write_verdict(verdict.to_json())

    async def _play(self) -> Verdict:
        """Open, set up, wait for the claim, grade: the agent's sandbox is gone before another is opened."""
        self._episode.state.move(Phase.OPENING)
        async with AsyncExitStack() as background_tasks:
            around = await self._surround(background_tasks)
            grading = Grading(self._episode, self._admission, self._settings, around)
            async with around.services.watched(), AsyncExitStack() as agents:
                sandbox, driver, sealed = await self._open(agents, around)
                await _until(self._episode.claimed, driver)
                if self._episode.task.in_place:
                    await driver.freeze(spare=self._episode.task.spared)
                    return await grading.in_place(sandbox, driver, sealed)
                left = await self._leave(sandbox, driver, sealed)
            async with around.services.watched():
                return await grading.afresh(left)

    async def _surround(self, background_tasks: AsyncExitStack) -> EpisodeResources:
        """The services that all sandboxes of the episode speak to, and the credentials that they get."""
        episode, sandbox_factory = self._episode, self._episode.sandbox_factory
        suite, accounts = sandbox_factory.suite, episode.ticket.accounts
        credentials = await anyio.to_thread.run_sync(suite.credentials, episode.task, accounts)
        if sandbox_factory.provider.isolation == "none" and any(
            folder.is_absolute() for folder, _ in credentials
        ):
            raise SetUpError("its credentials go to places outside of the suite, which only a container has")
        seconds = episode.task.deadlines.servers_seconds or self._settings.servers_seconds
        async with self._admission.opening:
            services = await background_tasks.enter_async_context(
                sandbox_factory.services(episode.task, episode.label, seconds=seconds)
            )
        return EpisodeResources(services, credentials)

    async def _open(
        self, agents: AsyncExitStack, around: EpisodeResources
    ) -> tuple[Sandbox, DriverClient, Path | None]:
        """The agent's sandbox, ready to be played, and the task's folder as preprocess left it."""
        episode, sandbox_factory = self._episode, self._episode.sandbox_factory
        async with self._admission.opening:
            network = sandbox_factory.network_for(episode.task)
            sandbox, driver = await agents.enter_async_context(
                sandbox_factory.open(f"{episode.label}-agent", network, services=around.services)
            )
            episode.image_digest = sandbox.image_digest
            servers, sealed = await self._set_up(around).run(sandbox, driver)
            episode.tool_session = await self._furnish(sandbox, driver, servers)
        episode.ready_at = datetime.now(UTC)
        episode.state.move(Phase.READY)
        log.info(
            "episode ready",
            extra=fields(episode=episode.label, seconds=round(time.time() - episode.started_at, 3)),
        )
        return sandbox, driver, sealed

    async def _furnish(
        self, sandbox: Sandbox, driver: DriverClient, servers: Mapping[str, ServerInfo]
    ) -> ToolSession:
        """What the agent gets to play with: the servers' tools and the suite's own, and a way to each."""
        sandbox_factory, task = self._episode.sandbox_factory, self._episode.task
        seconds = task.deadlines.servers_seconds or self._settings.servers_seconds
        local = await sandbox_factory.local_tools.of(
            sandbox_factory.suite, task, driver, root=sandbox.root, timeout_seconds=seconds
        )
        offered = {name: facts.tools for name, facts in servers.items()}
        if sandbox_factory.cuts_overlong:
            offered = {name: without_output_schemas(tools) for name, tools in offered.items()}
        if local:
            offered[LOCAL] = [tool for tools in local.values() for tool in tools]
        calls = Calls(
            driver,
            local=local_spec(sandbox_factory.suite.profile, local, sandbox.root) if local else None,
            deadline_seconds=seconds,
            workspace=sandbox.root / sandbox_factory.suite.profile.workspace
            if sandbox_factory.cuts_overlong
            else None,
        )
        return ToolSession(calls, ToolRouter(offered, sandbox_factory.names), offered)

    def _set_up(self, around: EpisodeResources) -> SetUp:
        episode, settings, own = self._episode, self._settings, self._episode.task.deadlines
        return SetUp(
            suite=episode.sandbox_factory.suite,
            task=episode.task,
            launch_time=episode.launch_time,
            common=episode.sandbox_factory.common,
            scratch=self._scratch,
            credentials=around.credentials,
            deadlines=Deadlines(
                servers=own.servers_seconds or settings.servers_seconds,
                preprocess=own.preprocess_seconds or settings.preprocess_seconds,
                whole=own.set_up_seconds or settings.set_up_seconds,
            ),
        )

    async def _leave(self, sandbox: Sandbox, driver: DriverClient, sealed: Path | None) -> CapturedWorkspace:
        """Take the workspace once nothing inside runs any more; one that is too large does not cross."""
        await driver.freeze()
        await sandbox.pause()
        archive = self._scratch / "workspace.tar"
        folder = sandbox.root / self._episode.sandbox_factory.suite.profile.workspace
        try:
            await sandbox.get(folder, archive, self._settings.workspace_mib << 20)
        except LimitExceededError as error:
            return CapturedWorkspace(None, sealed, (f"the whole workspace: {error.message}",))
        return CapturedWorkspace(archive, sealed)

    async def _end(self, ending: Ending, cause: DecathlonError | None) -> None:
        episode = self._episode
        try:
            if episode.verdict is None:
                detail = cause.message if cause is not None else str(ending)
                status = _STATUS.get(ending, "not_evaluated")
                attempt = await anyio.to_thread.run_sync(attempt_of, episode)
                self._settle(verdict_without_grading(attempt, status=status, detail=detail))
        except Exception:
            log.exception("no verdict could be made", extra=fields(episode=episode.label))
        finally:
            episode.state.end(ending, cause)
            episode.tool_session = None
        episode.journal.add("end", ending=str(ending), cause=cause.message if cause else None)
        episode.journal.close()
        # Whoever plays over a pipe reads this log.
        told = {"reward": episode.verdict.reward} if episode.verdict and episode.policy == "visible" else {}
        log.info(
            "episode ended",
            extra=fields(
                episode=episode.label,
                task=episode.task_name,
                ending=ending,
                calls=episode.calls,
                **told,
                **({"cause": cause.message} if cause else {}),
            ),
        )


async def _until(claimed: anyio.Event, driver: DriverClient) -> None:
    """Wait for the claim. Raises SandboxLostError when the sandbox is lost first."""
    async with anyio.create_task_group() as either:

        async def lost() -> None:
            await driver.closed.wait()
            either.cancel_scope.cancel()

        either.start_soon(lost)
        await claimed.wait()
        either.cancel_scope.cancel()
    if not claimed.is_set():
        raise await driver.closed_error()
