"""Grading of an episode's attempt: captures the workspace and opens the sandboxes for `grading.grade`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
from anyio import CancelScope

from decathlon_mcp.driver_client.driver import DriverClient
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.keeping import keep_attempt
from decathlon_mcp.episodes.services import EpisodeResources
from decathlon_mcp.errors import AtCapacityError, LimitExceededError
from decathlon_mcp.grading.attempt import Attempt
from decathlon_mcp.grading.evaluation import grade
from decathlon_mcp.grading.job import CapturedWorkspace, GradingJob, OpenSandbox
from decathlon_mcp.grading.traj_log import TrajectoryLog, eval_res
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import Network

log = logging.getLogger("decathlon.rewards")

WORKSPACE_FILE = "workspace.tar"
"""Archive of the agent's workspace in the episode's scratch folder."""


async def capture_workspace(
    episode: Episode, sandbox: Sandbox, driver: DriverClient | None, scratch: Path, sealed: Path | None
) -> CapturedWorkspace:
    """Stop every process in the agent's sandbox, then copy its workspace to an archive in `scratch`.

    `driver` is None if a server that died has paused the sandbox.

    Raises LimitExceededError for a workspace over its limit, and AtCapacityError for one that the disk has no
    room for.
    """
    if driver is not None:
        await driver.freeze()
    await sandbox.pause()
    archive = scratch / WORKSPACE_FILE
    await anyio.Path(archive).unlink(missing_ok=True)
    folder = sandbox.root / episode.sandbox_factory.suite.profile.workspace
    disk, limit_bytes = episode.journal.disk, episode.spec.limits.workspace_bytes
    allowed_bytes = limit_bytes if disk is None else disk.limit_archive(limit_bytes)
    try:
        await sandbox.get(folder, archive, allowed_bytes)
    except LimitExceededError:
        if allowed_bytes < limit_bytes:
            # Not the agent's fault, so the attempt must not be forfeited.
            raise AtCapacityError(
                "the server's disk is nearly full: there is no room for the workspace"
            ) from None
        raise
    return CapturedWorkspace(archive, sealed)


@dataclass(frozen=True, slots=True)
class EpisodeGrader:
    """Grades the attempt of one claimed episode."""

    episode: Episode
    resources: EpisodeResources
    admission: Admission

    async def grade_in_fresh_sandbox(self, captured: CapturedWorkspace) -> Verdict:
        """Grade in new sandboxes of the image that the agent had."""
        episode, factory = self.episode, self.episode.sandbox_factory
        names = (f"{episode.spec.label}-grader{number}" for number in itertools.count(1))

        @asynccontextmanager
        async def open_sandbox(network: Network) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
            async with factory.open(
                next(names),
                network,
                image=episode.image_digest,
                forwards=self.resources.services.targets,
                records=episode.records,
                role="grader",
                opening=self.admission.opening_graders,
                web=self.resources.web if factory.uses_web(episode.spec.task, "grader") else None,
            ) as opened:
                yield opened

        return await self._grade(open_sandbox, captured)

    async def grade_in_place(self, sandbox: Sandbox, driver: DriverClient, sealed: Path | None) -> Verdict:
        """Grade in the agent's own sandbox, for tasks whose evaluator inspects running processes.

        Every process is killed first, except those that the suite's settings spare.
        """
        async with self.admission.captures:
            await driver.freeze(spare=self.episode.spec.task.spared)

        @asynccontextmanager
        async def open_sandbox(network: Network) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
            yield sandbox, driver

        return await self._grade(open_sandbox, CapturedWorkspace(None, sealed), in_place=True)

    async def _grade(
        self, open_sandbox: OpenSandbox, captured: CapturedWorkspace, *, in_place: bool = False
    ) -> Verdict:
        episode, factory = self.episode, self.episode.sandbox_factory
        attempt = episode.attempt()
        if episode.spec.keeps_workspace:
            await keep_attempt(episode, attempt, captured, in_place=in_place)
        job = GradingJob(
            attempt=attempt,
            suite=factory.suite,
            task=episode.spec.task,
            open_sandbox=open_sandbox,
            captured=captured,
            common=factory.common,
            deadline_seconds=episode.spec.limits.evaluation_seconds,
            credentials=self.resources.credentials,
            in_place=in_place,
            grades_truncated=factory.grades_truncated,
        )
        verdict = await grade(job)
        with CancelScope(shield=True):
            try:
                await anyio.to_thread.run_sync(self._write_toolathlon_files, attempt, verdict)
            except Exception:
                # What the agent and its tools sent is in these files; it must not cost the verdict.
                log.exception(
                    "files of an episode could not be written", extra=fields(episode=episode.id[:12])
                )
        return verdict

    def _write_toolathlon_files(self, attempt: Attempt, verdict: Verdict) -> None:
        # Toolathlon's viewer (vis_traj) shows folders with files of these names.
        suite, journal = self.episode.sandbox_factory.suite, self.episode.journal
        log = TrajectoryLog(attempt, suite=suite, task=self.episode.spec.task, root=suite.profile.root)
        journal.write_chunks("traj_log.json", log)
        journal.write("eval_res.json", eval_res(attempt, suite.profile, verdict))
