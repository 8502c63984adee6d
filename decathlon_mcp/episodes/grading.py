"""Grading of an episode's attempt: captures the workspace and opens the sandboxes for `grading.grade`."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio import CancelScope

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.beginnings import EpisodeHooks, EpisodeResources
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.records import Progress
from decathlon_mcp.episodes.specification import Claim, EpisodeLimits
from decathlon_mcp.errors import DiskFullError, LimitExceededError, SandboxLostError
from decathlon_mcp.grading.attempt import Attempt, CallCounts, RecordedCalls
from decathlon_mcp.grading.evaluation import grade
from decathlon_mcp.grading.fault import AgentsFaultError
from decathlon_mcp.grading.inputs import CapturedWorkspace, GradingJob, OpenSandbox
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.sandboxes.capabilities import fills_disk
from decathlon_mcp.storage.disk import is_full
from decathlon_mcp.storage.kept_files import SERVER_LOGS_FILE, indented
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import Network

log = logging.getLogger("decathlon.rewards")
ROOM_SECONDS = 3600.0
"""How long a claimed attempt waits for space on the server's disk before it has no verdict."""
ROOM_RETRY_SECONDS = 5.0
"""Time between two looks at the disk while an attempt waits for space."""
COPY_SECONDS = 600.0
"""How long a workspace may take to be copied from its sandbox, by whatever provider: ten times what the
largest takes on an idle machine. Meanwhile it keeps the captures of others waiting."""
_T = TypeVar("_T")

WORKSPACE_FILE = "workspace.tar"
"""Archive of the agent's workspace in the episode's scratch folder."""
_MEASURED_FILE = "measured.tar"
"""Link to the null device in the same folder, into which a workspace is packed to learn its size."""


async def with_room(
    episode: Episode, step: Callable[[], Awaitable[_T]], sandbox: Sandbox | None = None
) -> _T:
    """The result of a step of grading, done again while the server's disk has no room for it.

    Raises what the step raises; DiskFullError only after ROOM_SECONDS, and AgentsFaultError instead if it is
    the agent's `sandbox` that has taken more than its share of the disk.
    """
    deadline, is_logged = anyio.current_time() + ROOM_SECONDS, False
    while True:
        try:
            return await step()
        except DiskFullError as error:
            if anyio.current_time() >= deadline:
                if sandbox is not None and await fills_disk(
                    sandbox, episode.sandbox_factory.health.sandboxes
                ):
                    message = f"{error.message} (this sandbox is over its share of disk)"
                    raise AgentsFaultError(message) from error
                raise
            if not is_logged:
                is_logged = True
                log.warning(
                    "a claimed attempt waits for space on the disk",
                    extra=fields(episode=episode.public_id, why=error.message),
                )
        episode.waits_for_room = True
        try:
            await anyio.sleep(ROOM_RETRY_SECONDS)
        finally:
            episode.waits_for_room = False


async def capture_workspace(
    episode: Episode,
    sandbox: Sandbox,
    driver: DriverClient | None,
    scratch: Path,
    task_folder_archive: Path | None,
    *,
    measures: bool = True,
) -> CapturedWorkspace:
    """Stop every process in the agent's sandbox, then copy its workspace to an archive in `scratch`.

    `driver` is None if the sandbox has been paused before. `measures`: whether a workspace for which the disk
    has no room is compared with its own limit, which later tries need not do again.

    Raises LimitExceededError for a workspace over its limit, and DiskFullError if the disk has no room for
    it; then it can be tried again.
    """
    if driver is not None:
        await _keep_server_logs(episode, await driver.freeze())
    await sandbox.pause()
    archive = scratch / WORKSPACE_FILE
    await anyio.Path(archive).unlink(missing_ok=True)
    folder = sandbox.root / episode.sandbox_factory.suite.profile.workspace
    disk, limit_bytes = episode.trajectory.disk, episode.spec.limits.workspace_bytes
    allowed_bytes = limit_bytes if disk is None else disk.limit_archive(limit_bytes)
    try:
        await _copy(sandbox, folder, archive, allowed_bytes)
    except LimitExceededError as error:
        if allowed_bytes == limit_bytes or error.data.get("budget") != "bytes":
            raise
        # Not the agent's fault, so the attempt must not be forfeited.
        message = "the server's disk is nearly full: there is no room for the workspace"
    except OSError as error:
        if not is_full(error):
            raise
        message = (
            f"the server's disk cannot be written ({error.strerror}): there is no room for the workspace"
        )
    else:
        return CapturedWorkspace(archive, task_folder_archive, location=folder)
    # A sparse file takes nothing of the sandbox's memory and may be of any size: an agent would wait for room
    # that no disk has, and end without a reward.
    if measures:
        measured = scratch / _MEASURED_FILE
        try:
            measured.unlink(missing_ok=True)  # of a server that was killed
            measured.symlink_to(os.devnull)
            await _copy(sandbox, folder, measured, limit_bytes)
        except OSError as error:
            if not is_full(error):
                raise
        finally:
            measured.unlink(missing_ok=True)
    raise DiskFullError(message)


async def _copy(sandbox: Sandbox, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
    """Pack a folder of a sandbox. Raises LimitExceededError, also if it takes longer than `COPY_SECONDS`."""
    try:
        with anyio.fail_after(COPY_SECONDS):
            await sandbox.get(folder, archive, limit_bytes)
    except TimeoutError:
        message = f"the workspace could not be copied within {COPY_SECONDS:g} s"
        raise LimitExceededError(message, budget="seconds") from None


async def _keep_server_logs(episode: Episode, logs: Mapping[str, str]) -> None:
    """Keep what the task's servers wrote to stderr, for people. A server that has a secret may print it."""
    if logs and not episode.sandbox_factory.suite.token_names(episode.spec.task):
        files, content = episode.files, indented(dict(logs))
        await anyio.to_thread.run_sync(files.write_log, SERVER_LOGS_FILE, (content,))


def _seconds(progress: Progress, claim: Claim | None, limits: EpisodeLimits) -> float | None:
    """How long the attempt took; None if it did not begin, or is not over."""
    if claim is None or progress.ready_at is None:
        return None
    seconds = None if progress.ready is None else progress.ready.until(claim.instant)
    if seconds is None:
        # The machine was started again. Its clock may be wrong, but no attempt is longer than its limit.
        seconds = min((claim.at - progress.ready_at).total_seconds(), limits.episode_seconds)
    return max(0.0, seconds)


def attempt_of(episode: Episode) -> Attempt:
    """What grading needs to know about the attempt; complete once it is claimed. Blocks."""
    spec, factory, claim = episode.spec, episode.sandbox_factory, episode.claim
    progress, tools, index = episode.records.progress, episode.tools, episode.trajectory.index
    network = factory.network_for(spec.task)
    # Grading reads evaluators and rubrics now, unless preprocess may have written them.
    revision = factory.suite.revision_of(spec.task)
    facts = progress.facts.with_(**episode.reported)
    if claim is not None and revision != facts.suite_revision:
        facts = facts.with_(suite_changed=True)
    return Attempt(
        episode=spec.public_id,
        labels=spec.labels,
        task=spec.task_name,
        suite=factory.suite.name,
        facts=facts if facts.suite_revision else facts.with_(suite_revision=revision),
        isolation=factory.provider.isolation,
        unlimited=factory.provider.unlimited,
        agent_network=network,
        grader_network=network if spec.task.in_place else factory.grader_network_for(spec.task),
        launch_time=spec.launch_time,
        prompt=episode.prompt,
        calls=RecordedCalls(episode.trajectory.sent_calls()),
        # A call that was sent counts, and without a reply it counts as failed.
        call_counts=CallCounts(index.sent, index.failed + index.sent - index.answered, len(index.tools)),
        tools=tools.offered.servers if tools.offered else {},
        claimed=claim is not None and claim.by_agent,
        truncated_by=claim.truncated_by if claim else None,
        answer=claim.answer if claim else None,
        turns=claim.turns if claim else None,
        started_at=progress.ready_at,
        claimed_at=claim.at if claim else None,
        seconds=_seconds(progress, claim, spec.limits),
    )


def require_whole_record(episode: Episode) -> None:
    """Raise SandboxLostError if the trajectory, which evaluators may judge, is gone or lacks calls."""
    damage, claimed = episode.trajectory.why_unreadable(), 0 if episode.claim is None else episode.claim.calls
    if (missing := claimed - episode.calls.sent) > 0:
        damage = f"{missing} of {claimed} calls are missing in it"
    if damage is not None:
        raise SandboxLostError(f"the episode's record, its trajectory, is damaged: {damage}")


@dataclass(frozen=True, slots=True)
class EpisodeGrader:
    """Grades the attempt of one claimed episode."""

    episode: Episode
    resources: EpisodeResources
    admission: Admission
    hooks: Sequence[EpisodeHooks] = ()

    async def grade_in_fresh_sandbox(self, captured: CapturedWorkspace) -> Verdict:
        """Grade in new sandboxes of the image that the agent had."""
        episode, factory = self.episode, self.episode.sandbox_factory
        names = (f"{episode.public_id}-grader{number}" for number in itertools.count(1))

        @asynccontextmanager
        async def open_sandbox(network: Network) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
            async with factory.open(
                next(names),
                network,
                image=episode.records.progress.facts.image_digest,
                attached=self.resources.attached,
                records=episode.sandbox_records,
                role="grader",
                opening=self.admission.opening_graders,
            ) as opened:
                yield opened

        return await self._grade(open_sandbox, captured)

    async def grade_in_place(
        self, sandbox: Sandbox, driver: DriverClient, task_folder_archive: Path | None
    ) -> Verdict:
        """Grade in the agent's own sandbox, for tasks whose evaluator inspects running processes.

        Every process is killed first, except the processes that the suite's settings spare.
        """
        finder = self.episode.sandbox_factory.fault_finder(self.episode.public_id)
        async with self.admission.captures, finder.deciding(sandbox):
            logs = await driver.freeze(spare=self.episode.spec.task.spared)
        await _keep_server_logs(self.episode, logs)

        @asynccontextmanager
        async def open_sandbox(network: Network) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
            yield sandbox, driver

        return await self._grade(open_sandbox, CapturedWorkspace(None, task_folder_archive), in_place=True)

    async def _grade(
        self, open_sandbox: OpenSandbox, captured: CapturedWorkspace, *, in_place: bool = False
    ) -> Verdict:
        episode, factory = self.episode, self.episode.sandbox_factory
        attempt = attempt_of(episode)
        for one in self.hooks:
            await one.captured(episode, attempt, captured, in_place=in_place)
        job = GradingJob(
            attempt=attempt,
            suite=factory.suite,
            task=episode.spec.task,
            open_sandbox=open_sandbox,
            captured=captured,
            common=factory.common,
            deadline_seconds=episode.spec.limits.evaluation_seconds,
            log=factory.suite_hooks.evaluator_log,
            credentials=self.resources.credentials,
            in_place=in_place,
            fault_finder=factory.fault_finder(episode.public_id),
        )
        verdict = await with_room(episode, partial(grade, job))

        def write_files() -> None:
            for name, chunks in factory.suite_hooks.files(attempt, episode.spec.task, verdict).items():
                episode.files.write_log(name, chunks)

        with CancelScope(shield=True):
            try:
                await anyio.to_thread.run_sync(write_files)
            except Exception:
                # What the agent and its tools sent is in these files; it must not cost the verdict.
                log.exception(
                    "files of an episode could not be written", extra=fields(episode=episode.public_id)
                )
        return verdict
