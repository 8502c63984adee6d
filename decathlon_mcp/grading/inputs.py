"""Inputs of grading: a closed attempt with its files, and the archives for a sandbox made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from decathlon_mcp.archives.reading import ArchiveReader, Kind, digest_of
from decathlon_mcp.archives.workspace import CleanWorkspace
from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.grading.attempt import Attempt
from decathlon_mcp.grading.fault import FaultFinder
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import Network

WORKSPACE_BYTES = 4 << 30
WORKSPACE_MEMBERS = 250_000
_CACHE = "__pycache__"

OpenSandbox: TypeAlias = Callable[[Network], AbstractAsyncContextManager[tuple[Sandbox, DriverClient]]]
"""Opens a sandbox and its driver for one run. When grading in place, it yields the agent's own sandbox."""
EvaluatorLog: TypeAlias = Callable[[Attempt, Task, PurePosixPath], Iterable[bytes]]
"""The file that an evaluator reads about an attempt at a task, in chunks that are the same every time; empty
if it gets none. The path is the suite's folder in its sandbox. Iterating blocks."""


@dataclass(frozen=True, slots=True)
class CapturedWorkspace:
    """The files of a closed attempt, as archives on the server's disk.

    `workspace` is a tar of the agent's workspace. It comes out of a sandbox, so nothing in it is trusted;
    None if it could not be captured, and then `refused` says why. `task_folder_archive` is a tar of the
    task's folder after preprocess, with names relative to that folder; None means the suite's own files.
    `location`: where the workspace was in its sandbox; None: where graders have it.
    """

    workspace: Path | None
    task_folder_archive: Path | None
    refused: tuple[str, ...] = ()
    location: PurePosixPath | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingJob:
    """One closed attempt to grade."""

    attempt: Attempt
    suite: Suite
    task: Task
    open_sandbox: OpenSandbox
    captured: CapturedWorkspace
    common: Path
    """The suite's common archive."""
    deadline_seconds: float
    """Deadline for all runs together; the time counts while a sandbox is open."""
    log: EvaluatorLog
    """Makes the log that evaluators read."""
    credentials: Sequence[tuple[PurePosixPath, bytes]] = ()
    """Archives that are unpacked over `common`, each with its target folder."""
    in_place: bool = False
    """Whether the evaluator runs in the agent's own sandbox, on the workspace as it is there."""
    fault_finder: FaultFinder | None = None
    """Decides whose fault a failure of the provider is; without it such a failure gives no reward."""


Archive: TypeAlias = tuple[PurePosixPath, ArchiveSource]
"""An archive and the folder, relative to the suite's root, into which it is unpacked."""


@dataclass(frozen=True, slots=True)
class GradingInputs:
    """The archives of one grading, in the order of unpacking; the workspace's archive comes last.

    `workspace` is unpacked in the root; None when grading in place. `evaluator_digest` identifies the
    evaluator's files.
    """

    archives: Sequence[Archive]
    workspace: CleanWorkspace | None
    evaluator_digest: str

    @property
    def refused(self) -> tuple[str, ...]:
        """What was left out of the workspace or changed, once it has been unpacked."""
        return () if self.workspace is None else tuple(self.workspace.refused)


def prepare_inputs(job: GradingJob, scratch: Path) -> GradingInputs:
    """Collect the archives of a grading; new archives are written to the folder `scratch`. Blocks."""
    root, profile, captured = PurePosixPath(), job.suite.profile, job.captured
    if captured.task_folder_archive is not None:
        task_files, folder = (job.task.folder, captured.task_folder_archive), root
    else:
        task_files, folder = (root, scratch / "task.tar"), job.task.folder
        job.suite.task_archive(job.task, task_files[1], sealed=True)
    digest = evaluator_digest(task_files[1], folder=folder, names=profile.grading)
    workspace = None
    if captured.workspace is not None and not job.in_place:
        workspace = CleanWorkspace(
            captured.workspace,
            prefix=str(profile.workspace),
            limit_bytes=WORKSPACE_BYTES,
            limit_members=WORKSPACE_MEMBERS,
            root=profile.root,
            location=captured.location,
        )
    return GradingInputs([(root, job.common), *job.credentials, task_files], workspace, digest)


def evaluator_digest(archive: Path, *, folder: PurePosixPath, names: Collection[str]) -> str:
    """SHA-256 over the files that grade, as `sha256:` and 64 hexadecimal digits.

    `archive` has the task's files below `folder`; files below one of `names` (evaluation, groundtruth,
    rubric) count, except Python's caches. Each file or link is one line: its kind (`file`, `link`), a zero
    byte, its path, a zero byte, the SHA-256 of its content (of a link: the target), a line feed. The digest
    is over the sorted lines; modes and times do not count.
    """
    # What preprocess wrote counts too: a task that generates its groundtruth for each episode has another
    # digest in each.
    lines = list[bytes]()
    with archive.open("rb") as file:
        reader = ArchiveReader.of_file(file)
        for member in reader:
            path = PurePosixPath(member.name)
            if not path.is_relative_to(folder) or member.kind is Kind.FOLDER:
                continue
            path = path.relative_to(folder)
            if path.parts and path.parts[0] in names and _CACHE not in path.parts:
                if member.kind in (Kind.SYMLINK, Kind.HARD_LINK):
                    kind, content = b"link", member.link.encode("utf-8", "surrogateescape")
                else:
                    kind, content = b"file", digest_of(reader.body()).encode()
                line = (kind, str(path).encode("utf-8", "surrogateescape"), content)
                lines.append(b"\0".join(line) + b"\n")
    return f"sha256:{hashlib.sha256(b''.join(sorted(lines))).hexdigest()}"
