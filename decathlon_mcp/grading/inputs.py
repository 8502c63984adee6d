"""The archives that go into every sandbox of one grading, and the digest of the evaluator in them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from decathlon_mcp.archives.reading import ArchiveReader, Kind, Member, digest_of
from decathlon_mcp.archives.workspace import CleanWorkspace
from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.grading.job import GradingJob

WORKSPACE_BYTES = 4 << 30
WORKSPACE_MEMBERS = 250_000
_CACHE = "__pycache__"

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
    """Collect the archives of a grading; new ones are written to the folder `scratch`. Blocks."""
    root = PurePosixPath()
    task_files, evaluator = _task_files(job, scratch)
    archives: list[Archive] = [(root, job.common), *job.credentials, task_files]
    return GradingInputs(archives, _workspace(job), evaluator)


def _task_files(job: GradingJob, scratch: Path) -> tuple[Archive, str]:
    """The task's folder with its evaluator and groundtruth, and the digest of evaluator and groundtruth."""
    names = job.suite.profile.grading
    if job.captured.task_folder_archive is not None:
        digest = evaluator_digest(job.captured.task_folder_archive, folder=PurePosixPath(), names=names)
        return (job.task.folder, job.captured.task_folder_archive), digest
    archive = scratch / "task.tar"
    job.suite.task_archive(job.task, archive, sealed=True)
    return (PurePosixPath(), archive), evaluator_digest(archive, folder=job.task.folder, names=names)


def _workspace(job: GradingJob) -> CleanWorkspace | None:
    if job.in_place or job.captured.workspace is None:
        return None
    return CleanWorkspace(
        job.captured.workspace,
        prefix=str(job.suite.profile.workspace),
        limit_bytes=WORKSPACE_BYTES,
        limit_members=WORKSPACE_MEMBERS,
        root=job.suite.profile.root,
        location=job.captured.location,
    )


def evaluator_digest(archive: Path, *, folder: PurePosixPath, names: Collection[str]) -> str:
    """SHA-256 over the files that grade, as `sha256:` and 64 hexadecimal digits.

    `archive` has the task's files below `folder`; files below one of `names` (evaluation, groundtruth,
    rubric) count, except Python's caches. Each file or link is one line: its kind (`file`, `link`), a zero
    byte, its path, a zero byte, the SHA-256 of its content (of a link: the target), a line feed. The digest
    is over the sorted lines; modes and times do not count.
    """
    # What preprocess wrote counts too: a task that generates its groundtruth for each episode has another
    # digest in each.
    lines: list[bytes] = []
    with archive.open("rb") as file:
        reader = ArchiveReader.of_file(file)
        for member in reader:
            path = PurePosixPath(member.name)
            if not path.is_relative_to(folder) or member.kind is Kind.FOLDER:
                continue
            path = path.relative_to(folder)
            if path.parts and path.parts[0] in names and _CACHE not in path.parts:
                lines.append(_line(reader, member, path))
    return f"sha256:{hashlib.sha256(b''.join(sorted(lines))).hexdigest()}"


def _line(reader: ArchiveReader, member: Member, path: PurePosixPath) -> bytes:
    if member.kind in (Kind.SYMLINK, Kind.HARD_LINK):
        kind, content = b"link", member.link.encode("utf-8", "surrogateescape")
    else:
        kind, content = b"file", digest_of(reader.body()).encode()
    return b"\0".join((kind, str(path).encode("utf-8", "surrogateescape"), content)) + b"\n"
