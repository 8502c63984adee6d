"""The owner of an episode: one task, from birth to end. Sandboxes are opened and removed here and nowhere else."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from decathlon_mcp.episodes.admission import Admission, Ticket
from decathlon_mcp.episodes.episode import Episode, Playground
from decathlon_mcp.episodes.set_up import Deadlines, SetUp
from decathlon_mcp.episodes.toolbox import Toolbox
from decathlon_mcp.errors import DecathlonError, SandboxLostError
from decathlon_mcp.link import Link
from decathlon_mcp.model import Ending, Network, Phase
from decathlon_mcp.observe import fields
from decathlon_mcp.providers.base import Sandbox
from decathlon_mcp.rewards import Attempt, CallRecord, Verdict, grade
from decathlon_mcp.settings import Settings

log = logging.getLogger("decathlon.episodes")


@dataclass(frozen=True, slots=True)
class _Left:
    """What the agent leaves behind: archives on the server's disk."""

    workspace: Path
    sealed: Path | None


class Life:
    """Runs one episode. `run` never raises but when it is cancelled, and then nothing is left either."""

    def __init__(self, episode: Episode, *, admission: Admission, settings: Settings) -> None:
        self._episode = episode
        self._admission = admission
        self._settings = settings
        self._scratch = episode.journal.folder / "scratch"

    async def run(self, ticket: Ticket) -> None:
        """From QUEUED to ENDED."""
        episode = self._episode
        ending, cause = Ending.SERVER_STOPPED, None
        log.info("episode started", extra=fields(episode=episode.label, task=episode.task_name))
        try:
            ending = await self._run(ticket)
        except DecathlonError as error:
            cause = error
            opened = episode.playground is not None
            lost = isinstance(error, SandboxLostError)
            ending = Ending.SANDBOX_LOST if lost else Ending.NO_VERDICT if opened else Ending.SET_UP_FAILED
        except Exception:
            ending = Ending.FAULT
            log.exception("episode failed", extra=fields(episode=episode.label, task=episode.task_name))
        finally:
            self._end(ending, cause)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(lambda: shutil.rmtree(self._scratch, ignore_errors=True))

    async def _run(self, ticket: Ticket) -> Ending:
        episode = self._episode
        self._scratch.mkdir(mode=0o700)
        async with AsyncExitStack() as place:
            with episode.lease.limit():
                await place.enter_async_context(self._admission.place(ticket))
                left = await self._play()
                verdict = await self._grade(left)
                episode.verdict = verdict
                episode.journal.write_verdict(verdict.to_json())
        if episode.verdict is None:
            return episode.left or (Ending.TIME_OVER if episode.lease.over else Ending.LEASE_EXPIRED)
        if episode.verdict.status != "scored":
            return Ending.NO_VERDICT
        episode.state.move(Phase.SCORED)
        if episode.left is None:
            with episode.lease.limit():
                await anyio.sleep_forever()
        return episode.left or Ending.SCORED

    async def _play(self) -> _Left:
        """Open, set up, wait for the claim, take the workspace; then the agent's sandbox is removed."""
        episode, stage = self._episode, self._episode.stage
        episode.state.move(Phase.OPENING)
        async with AsyncExitStack() as sandboxes:
            async with self._admission.opening:
                network = stage.network_for(episode.task)
                sandbox, link = await sandboxes.enter_async_context(stage.open(f"{episode.label}-agent", network))
                servers, sealed = await self._set_up().run(sandbox, link)
            episode.playground = Playground(link, Toolbox(servers, stage.names))
            episode.state.move(Phase.READY)
            log.info(
                "episode ready",
                extra=fields(episode=episode.label, seconds=round(time.time() - episode.started_at, 3)),
            )
            await _until(episode.claimed, link)
            return _Left(await self._take_workspace(sandbox, link), sealed)

    def _set_up(self) -> SetUp:
        episode, settings = self._episode, self._settings
        return SetUp(
            suite=episode.stage.suite,
            task=episode.task,
            launch_time=episode.launch_time,
            common=episode.stage.common,
            scratch=self._scratch,
            deadlines=Deadlines(
                servers=settings.servers_seconds,
                preprocess=settings.preprocess_seconds,
                whole=settings.set_up_seconds,
            ),
        )

    async def _take_workspace(self, sandbox: Sandbox, link: Link) -> Path:
        """Nothing inside runs any more when the workspace is taken."""
        await link.freeze()
        await sandbox.pause()
        archive = self._scratch / "workspace.tar"
        folder = sandbox.root / self._episode.stage.suite.dialect.workspace
        await sandbox.get(folder, archive, self._settings.workspace_mib << 20)
        return archive

    async def _grade(self, left: _Left) -> Verdict:
        episode, stage = self._episode, self._episode.stage
        attempt = self._attempt()

        @asynccontextmanager
        async def open_sandbox(network: Network) -> AsyncGenerator[tuple[Sandbox, Link]]:
            async with AsyncExitStack() as sandboxes:
                async with self._admission.opening:
                    opened = await sandboxes.enter_async_context(stage.open(f"{episode.label}-grader", network))
                yield opened

        return await grade(
            attempt,
            open_sandbox=open_sandbox,
            suite=stage.suite,
            task=episode.task,
            sealed=left.sealed,
            workspace=left.workspace,
            common=stage.common,
            deadline_seconds=self._settings.evaluation_seconds,
        )

    def _attempt(self) -> Attempt:
        episode, claim = self._episode, self._episode.claim
        assert claim is not None
        return Attempt(
            episode=episode.id,
            task=episode.task_name,
            suite=episode.stage.suite.name,
            launch_time=episode.launch_time,
            calls=[CallRecord.from_journal(event) for event in episode.journal.events("call")],
            claimed=claim.by_agent,
            truncated=claim.truncated,
            answer=claim.answer,
            prompt=episode.prompt,
        )

    def _end(self, ending: Ending, cause: DecathlonError | None) -> None:
        episode = self._episode
        if episode.verdict is None:
            status = _STATUS.get(ending, "not_evaluated")
            detail = cause.message if cause is not None else str(ending)
            episode.verdict = verdict_without_grading(self._attempt_so_far(), status=status, detail=detail)
            episode.journal.write_verdict(episode.verdict.to_json())
        episode.state.end(ending, cause)
        episode.playground = None
        episode.journal.add("end", ending=str(ending), cause=cause.message if cause else None)
        episode.journal.close()
        log.info(
            "episode ended",
            extra=fields(
                episode=episode.label,
                task=episode.task_name,
                ending=ending,
                reward=episode.verdict.reward,
                calls=episode.calls,
                **({"cause": cause.message} if cause else {}),
            ),
        )


async def _until(claimed: anyio.Event, link: Link) -> None:
    """Wait for the claim. Raises SandboxLostError when the sandbox is lost first."""
    async with anyio.create_task_group() as either:

        async def lost() -> None:
            await link.lost.wait()
            either.cancel_scope.cancel()

        either.start_soon(lost)
        await claimed.wait()
        either.cancel_scope.cancel()
    if not claimed.is_set():
        raise await link.loss()
