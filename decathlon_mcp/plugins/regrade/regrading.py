"""The grader of kept attempts, with the evaluators that the suites have now.

The same filters apply as in the first grading: the kept workspace comes from the agent's sandbox. The other
kept files are trusted as the rest of the state folder is.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import anyio.to_thread
from pydantic import ValidationError

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.beginnings import EpisodeResources, read_credentials
from decathlon_mcp.episodes.extensions import EpisodeResource
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.set_up import SEALED_LIMIT_BYTES
from decathlon_mcp.errors import BadRequestError, SettingsError, UnknownTaskError
from decathlon_mcp.grading.attempt import RecordedCalls
from decathlon_mcp.grading.evaluation import grade
from decathlon_mcp.grading.inputs import CapturedWorkspace, GradingJob, OpenSandbox
from decathlon_mcp.grading.signing import verdict_digest
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.plugins.history.workspaces import KEPT_WORKSPACE
from decathlon_mcp.plugins.regrade.kept_attempts import (
    ATTEMPT_FILE,
    KEPT_SEALED,
    ORIGINAL_FILE,
    AttemptFiles,
    KeptAttempt,
    overlay,
)
from decathlon_mcp.sandboxes.base import Isolation, Sandbox
from decathlon_mcp.storage.kept_files import RESERVED_FILE, VERDICT_FILE
from decathlon_mcp.storage.store import ENDED, EpisodeRow, Store
from decathlon_mcp.storage.trajectory import Trajectory
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import Network, as_object, public_id
from decathlon_mcp.validation import quoted


@dataclass(frozen=True, slots=True)
class Regraded:
    """A new verdict of a kept attempt, signed, and the episode's own one; None if it has none."""

    before: Verdict | None
    after: Verdict


def is_open(folder: Path) -> bool:
    """Whether the episode of this folder has neither a verdict nor an end. Blocks.

    It is running, or its server was killed. Raises BadRequestError if its row cannot be read.
    """
    if (row := _row(folder)) is not None:
        return row.verdict is None and row.phase != ENDED
    return (folder / RESERVED_FILE).exists()


def read_kept(folder: Path) -> KeptAttempt:
    """Read the attempt that is kept in an episode's folder. Blocks.

    Raises BadRequestError if nothing is kept of it or its files are damaged.
    """
    files = AttemptFiles(folder)
    if not files.has(ATTEMPT_FILE):
        raise BadRequestError(
            "nothing of it was kept: its server did not run with `--keep workspace`, its attempt was not "
            "graded, or the disk was nearly full"
        )
    kept = KeptAttempt.parse(files.read(ATTEMPT_FILE))
    if kept.attempt.episode != public_id(folder.name):
        raise BadRequestError(f"{ATTEMPT_FILE} is that of another episode, {quoted(kept.attempt.episode)}")
    return kept


class Regrader:
    """Grades kept attempts again in sandboxes of a running registry, which starts no episode for it.

    `other_image`: the sandboxes have the image of the registry's settings, not the first grading's.
    """

    def __init__(self, registry: EpisodeRegistry, *, other_image: bool = False) -> None:
        self._registry = registry
        self._other_image = other_image

    async def regrade(
        self,
        folder: Path,
        kept_attempt: KeptAttempt,
        vary: Callable[[Suite], Suite] = lambda suite: suite,
    ) -> Regraded:
        """Make a new verdict for the kept attempt in this episode's folder. Writes nothing there.

        `vary`: makes the suite that it is graded with of its own.
        The verdict's status says if the attempt could not be graded. Raises UnknownTaskError or SuiteError if
        the suites do not have its task, BadRequestError if the attempt cannot be graded again or its files
        are damaged, SetUpError for its credentials, LimitExceededError if it is over the limits of today,
        AtCapacityError if the disk is nearly full, and OSError.
        """
        suite, task = self._find(kept_attempt)
        factory = self._registry.factory(suite.name)
        _refuse_unless_repeatable(kept_attempt, suite, task, factory)
        before, digest = await anyio.to_thread.run_sync(_own_verdict, folder)
        options, attempt = self._registry.options, kept_attempt.attempt
        facts = attempt.facts
        images: list[str | None] = [facts.image_digest]
        scratch = options.scratch / f"{attempt.episode}-regrade"
        scratch.mkdir(mode=0o700)
        try:
            captured = await anyio.to_thread.run_sync(
                self._restore, folder, kept_attempt, suite, task, scratch
            )
            revision = await anyio.to_thread.run_sync(suite.revision_of, task)
            recorded = await anyio.to_thread.run_sync(Trajectory(folder).update)
            async with AsyncExitStack() as stack:
                resources = await self._open_resources(stack, factory, kept_attempt, task)
                job = GradingJob(
                    attempt=replace(
                        attempt,
                        calls=RecordedCalls(recorded.sent_calls()),
                        grader_network=factory.grader_network_for(task),
                        facts=facts if revision == facts.suite_revision else facts.with_(suite_changed=True),
                    ),
                    suite=vary(suite),
                    task=task,
                    open_sandbox=self._opener(factory, kept_attempt, images, resources),
                    captured=captured,
                    common=factory.common,
                    deadline_seconds=options.limits.for_task(task).evaluation_seconds,
                    log=factory.suite_hooks.evaluator_log,
                    credentials=resources.credentials,
                    fault_finder=factory.fault_finder(attempt.episode),
                )
                verdict = await resources.reported(await grade(job))
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(lambda: shutil.rmtree(scratch, ignore_errors=True))
        # `verdict`: digest of the episode's own verdict with its signature; None if the episode has none.
        regrading = {"verdict": digest, "suite_revision": revision}
        changes = {"regrading": regrading, "image_digest": images[-1]}
        return Regraded(before, self._registry.signer.sign(verdict.model_copy(update=changes)))

    def _find(self, kept_attempt: KeptAttempt) -> tuple[Suite, Task]:
        catalogue, name = self._registry.catalogue, kept_attempt.attempt.suite
        suites = {suite.name: suite for suite in catalogue.suites}
        if name not in suites:
            suite_names = ", ".join(sorted(suites))
            raise UnknownTaskError(
                f"it was played in the suite {quoted(name)}, and --suite gives {suite_names}"
            )
        if suites[name].language != kept_attempt.language:
            raise BadRequestError(f"it was played with `--language {kept_attempt.language}`: set that")
        if kept_attempt.task_id not in suites[name].tasks:
            raise UnknownTaskError(f"the suite {name} has no task {quoted(kept_attempt.task_id)} any more")
        return suites[name], suites[name].task(kept_attempt.task_id)

    async def _open_resources(
        self, stack: AsyncExitStack, factory: SandboxFactory, kept_attempt: KeptAttempt, task: Task
    ) -> EpisodeResources:
        """What one grading gets: credentials, and the recorded web if the evaluator needs one."""
        opened: list[EpisodeResource] = []
        if factory.web is not None and factory.uses_web(task, "grader"):
            attempt = kept_attempt.attempt
            web = factory.web.episode(factory, task, f"{attempt.episode}-regrade", attempt.launch_time)
            opened.append(await stack.enter_async_context(web))
        return EpisodeResources(await read_credentials(factory, task, {}), opened)

    def _opener(
        self,
        factory: SandboxFactory,
        kept_attempt: KeptAttempt,
        images: list[str | None],
        resources: EpisodeResources,
    ) -> OpenSandbox:
        """Opens sandboxes for one grading; the digests of their images are added to `images`."""
        image = None if self._other_image else kept_attempt.attempt.facts.image_digest
        names = (f"{kept_attempt.attempt.episode}-regrader{number}" for number in itertools.count(1))

        @asynccontextmanager
        async def open_sandbox(network: Network) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
            opening = self._registry.admission.opening_graders
            async with factory.open(
                next(names),
                network,
                image=image,
                opening=opening,
                role="grader",
                attached=resources.attached,
            ) as opened:
                images.append(opened[0].image_digest)
                yield opened

        return open_sandbox

    def _restore(
        self, folder: Path, kept_attempt: KeptAttempt, suite: Suite, task: Task, scratch: Path
    ) -> CapturedWorkspace:
        """Unpack the kept archives into `scratch`, the task's folder joined with the checkout's."""
        options = self._registry.options
        files = AttemptFiles(folder, options.disk)
        workspace = scratch / "workspace.tar"
        files.restore_archive(KEPT_WORKSPACE, workspace, options.limits.workspace_bytes)
        location = None if kept_attempt.location is None else PurePosixPath(kept_attempt.location)
        if not kept_attempt.sealed:
            return CapturedWorkspace(workspace, None, location=location)
        preprocessed, checkout, task_folder_archive = (
            scratch / f"{name}.tar" for name in ("preprocessed", "checkout", "sealed")
        )
        files.restore_archive(KEPT_SEALED, preprocessed, SEALED_LIMIT_BYTES)
        suite.task_archive(task, checkout, sealed=True)
        original = as_object(files.read(ORIGINAL_FILE).get("files")) or {}
        overlay(checkout, preprocessed, task_folder_archive, folder=task.folder, original=original)
        preprocessed.unlink()
        checkout.unlink()
        return CapturedWorkspace(workspace, task_folder_archive, location=location)


_PLAYED: Mapping[Isolation, str] = {
    "none": "without isolation",
    "container": "in a container",
    "namespaces": "in namespaces, or in gVisor",
}


def _refuse_unless_repeatable(
    kept_attempt: KeptAttempt, suite: Suite, task: Task, factory: SandboxFactory
) -> None:
    """Raise BadRequestError for an attempt whose evaluator needs something that is not kept."""
    if kept_attempt.in_place or task.in_place:
        raise BadRequestError(
            f"{kept_attempt.attempt.task} is graded in the agent's own sandbox, which is not kept: "
            "it cannot be graded again"
        )
    if services := [*task.needs.services, *(shared.name for shared in suite.shared_resources(task.id))]:
        raise BadRequestError(
            f"the evaluator of {kept_attempt.attempt.task} may look at {', '.join(services)}, of "
            "which nothing is kept: it cannot be graded again"
        )
    isolation = factory.provider.isolation
    if isolation != kept_attempt.attempt.isolation:
        played = _PLAYED[kept_attempt.attempt.isolation]
        raise BadRequestError(
            f"it was played {played}, and the provider {factory.provider.name} grades otherwise: choose the "
            "same with --provider, and --isolation if that is host"
        )


def _own_verdict(folder: Path) -> tuple[Verdict | None, str | None]:
    """The episode's own verdict and its digest, from its row, or from its file if no row has one.

    Raises BadRequestError if it cannot be read.
    """
    row = _row(folder)
    source, values = "its row", None if row is None else row.verdict
    if values is None:
        files = AttemptFiles(folder)
        if not files.has(VERDICT_FILE):
            return None, None
        source, values = VERDICT_FILE, files.read(VERDICT_FILE)
    try:
        return Verdict.model_validate(values), verdict_digest(values)
    except (ValidationError, ValueError) as error:
        raise BadRequestError(f"the verdict in {source} is damaged: {str(error).splitlines()[0]}") from None


def _row(folder: Path) -> EpisodeRow | None:
    """The row of the episode in this folder. Raises BadRequestError if it cannot be read."""
    try:
        with Store.open_read_only(folder.parent.parent) as store:
            return None if store is None else store.find_one(EpisodeRow, id=folder.name)
    except SettingsError as error:
        raise BadRequestError(f"the episode's row cannot be read: {error.message}") from None
