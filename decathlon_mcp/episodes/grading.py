"""How an episode's attempt is graded: what is known of it, and the sandboxes that it is graded in."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import anyio.to_thread
from anyio import CancelScope

from decathlon_mcp.driver_client.driver import DriverClient
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.services import Services
from decathlon_mcp.grading.attempt import Attempt, CallRecord
from decathlon_mcp.grading.evaluation import grade
from decathlon_mcp.grading.job import CapturedWorkspace, GradingJob, OpenSandbox
from decathlon_mcp.grading.traj_log import trajectory_log
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.settings import Settings
from decathlon_mcp.types import Network


@dataclass(frozen=True, slots=True)
class EpisodeResources:
    """What all sandboxes of an episode have in common."""

    services: Services
    credentials: Sequence[tuple[PurePosixPath, bytes]]


@dataclass(frozen=True, slots=True)
class Grading:
    """Grades the attempt of one episode, once it is claimed."""

    episode: Episode
    admission: Admission
    settings: Settings
    around: EpisodeResources

    async def afresh(self, left: CapturedWorkspace) -> Verdict:
        """In sandboxes that the agent never touched, of the very image that it had."""
        episode, sandbox_factory = self.episode, self.episode.sandbox_factory
        names = (f"{episode.label}-grader{number}" for number in itertools.count(1))

        @asynccontextmanager
        async def open_sandbox(network: Network) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
            async with AsyncExitStack() as sandboxes:
                async with self.admission.opening:
                    opened = await sandboxes.enter_async_context(
                        sandbox_factory.open(
                            next(names),
                            network,
                            image=episode.image_digest,
                            services=self.around.services,
                        )
                    )
                yield opened

        return await self._grade(open_sandbox, left)

    async def in_place(self, sandbox: Sandbox, driver: DriverClient, sealed: Path | None) -> Verdict:
        """In the agent's own sandbox, where all has ended but what the evaluator is about."""

        @asynccontextmanager
        async def the_same(network: Network) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
            yield sandbox, driver

        return await self._grade(the_same, CapturedWorkspace(None, sealed), in_place=True)

    async def _grade(
        self, open_sandbox: OpenSandbox, captured: CapturedWorkspace, *, in_place: bool = False
    ) -> Verdict:
        episode, sandbox_factory = self.episode, self.episode.sandbox_factory
        attempt = await anyio.to_thread.run_sync(attempt_of, episode)
        deadline_seconds = episode.task.deadlines.evaluation_seconds or self.settings.evaluation_seconds
        job = GradingJob(
            attempt=attempt,
            suite=sandbox_factory.suite,
            task=episode.task,
            open_sandbox=open_sandbox,
            captured=captured,
            common=sandbox_factory.common,
            deadline_seconds=deadline_seconds,
            credentials=self.around.credentials,
            in_place=in_place,
        )
        verdict = await grade(job)
        with CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._keep, attempt, verdict)
        return verdict

    def _keep(self, attempt: Attempt, verdict: Verdict) -> None:
        """What Toolathlon leaves of a run, by its names: its viewer (vis_traj) shows such folders."""
        suite, journal = self.episode.sandbox_factory.suite, self.episode.journal
        root = suite.profile.root
        journal.write(
            "traj_log.json", trajectory_log(attempt, suite=suite, task=self.episode.task, root=root)
        )
        journal.write("eval_res.json", {"pass": verdict.success, "details": verdict.detail})


def attempt_of(episode: Episode) -> Attempt:
    """What is known of the attempt so far; complete once it is claimed. Reads the whole trajectory."""
    sandbox_factory, task, claim = episode.sandbox_factory, episode.task, episode.claim
    network = sandbox_factory.network_for(task)
    return Attempt(
        episode=episode.id,
        task=episode.task_name,
        suite=sandbox_factory.suite.name,
        suite_revision=sandbox_factory.suite.revision,
        isolation=sandbox_factory.provider.isolation,
        agent_network=network,
        grader_network=network if task.in_place else sandbox_factory.grader_network_for(task),
        launch_time=episode.launch_time,
        prompt=episode.prompt,
        calls=[CallRecord.from_journal(event) for event in episode.journal.events("call")],
        tools=episode.tool_session.offered if episode.tool_session else {},
        claimed=claim is not None and claim.by_agent,
        truncated=claim is not None and claim.truncated,
        answer=claim.answer if claim else None,
        turns=claim.turns if claim else None,
        started_at=episode.ready_at,
        claimed_at=claim.at if claim else None,
        image_digest=episode.image_digest,
    )
