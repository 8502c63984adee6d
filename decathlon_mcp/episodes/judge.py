"""How an episode's attempt is graded: what is known of it, and the sandboxes that it is graded in."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import anyio.to_thread
from anyio import CancelScope

from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.services import Services
from decathlon_mcp.link import Link
from decathlon_mcp.model import Network
from decathlon_mcp.providers.base import Sandbox
from decathlon_mcp.rewards import Attempt, CallRecord, OpenSandbox, Verdict, grade, trajectory_log
from decathlon_mcp.settings import Settings


@dataclass(frozen=True, slots=True)
class Left:
    """What the agent leaves behind: archives on the server's disk, and what could not be taken."""

    workspace: Path | None
    sealed: Path | None
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all sandboxes of an episode have in common."""

    services: Services
    credentials: Sequence[tuple[PurePosixPath, bytes]]


@dataclass(frozen=True, slots=True)
class Judge:
    """Grades the attempt of one episode, once it is claimed."""

    episode: Episode
    admission: Admission
    settings: Settings
    around: Surroundings

    async def afresh(self, left: Left) -> Verdict:
        """In sandboxes that the agent never touched, of the very image that it had."""
        episode, stage = self.episode, self.episode.stage
        names = (f"{episode.label}-grader{number}" for number in itertools.count(1))

        @asynccontextmanager
        async def open_sandbox(network: Network) -> AsyncGenerator[tuple[Sandbox, Link]]:
            async with AsyncExitStack() as sandboxes:
                async with self.admission.opening:
                    opened = await sandboxes.enter_async_context(
                        stage.open(
                            next(names),
                            network,
                            image=episode.image_digest,
                            services=self.around.services,
                        )
                    )
                yield opened

        return await self._grade(
            open_sandbox, sealed=left.sealed, workspace=left.workspace, refused=left.refused
        )

    async def in_place(self, sandbox: Sandbox, link: Link, sealed: Path | None) -> Verdict:
        """In the agent's own sandbox, where all has ended but what the evaluator is about."""

        @asynccontextmanager
        async def the_same(network: Network) -> AsyncGenerator[tuple[Sandbox, Link]]:
            yield sandbox, link

        return await self._grade(the_same, sealed=sealed, workspace=None, in_place=True)

    async def _grade(self, open_sandbox: OpenSandbox, **more: Any) -> Verdict:
        episode, stage = self.episode, self.episode.stage
        attempt = await anyio.to_thread.run_sync(attempt_of, episode)
        verdict = await grade(
            attempt,
            open_sandbox=open_sandbox,
            suite=stage.suite,
            task=episode.task,
            common=stage.common,
            credentials=self.around.credentials,
            deadline_seconds=episode.task.deadlines.evaluation_seconds or self.settings.evaluation_seconds,
            **more,
        )
        with CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._keep, attempt, verdict)
        return verdict

    def _keep(self, attempt: Attempt, verdict: Verdict) -> None:
        """What Toolathlon leaves of a run, by its names: its viewer (vis_traj) shows such folders."""
        suite, journal = self.episode.stage.suite, self.episode.journal
        root = suite.dialect.root
        journal.write(
            "traj_log.json", trajectory_log(attempt, suite=suite, task=self.episode.task, root=root)
        )
        journal.write("eval_res.json", {"pass": verdict.success, "details": verdict.detail})


def attempt_of(episode: Episode) -> Attempt:
    """What is known of the attempt so far; complete once it is claimed. Reads the whole trajectory."""
    stage, task, claim = episode.stage, episode.task, episode.claim
    network = stage.network_for(task)
    return Attempt(
        episode=episode.id,
        task=episode.task_name,
        suite=stage.suite.name,
        suite_revision=stage.suite.revision,
        isolation=stage.provider.isolation,
        agent_network=network,
        grader_network=network if task.in_place else stage.grader_network_for(task),
        launch_time=episode.launch_time,
        prompt=episode.prompt,
        calls=[CallRecord.from_journal(event) for event in episode.journal.events("call")],
        tools=episode.playground.offered if episode.playground else {},
        claimed=claim is not None and claim.by_agent,
        truncated=claim is not None and claim.truncated,
        answer=claim.answer if claim else None,
        turns=claim.turns if claim else None,
        started_at=episode.ready_at,
        claimed_at=claim.at if claim else None,
        image_digest=episode.image_digest,
    )
