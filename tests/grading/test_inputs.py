"""The archives of a grading, and the digest of the evaluator in them."""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import pytest

from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.episodes.extensions import SuiteHooks
from decathlon_mcp.grading.inputs import CapturedWorkspace, GradingJob, evaluator_digest, prepare_inputs
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.types import Network
from tests.grading.evaluators import REQUIRES_PAPER, evaluator
from tests.grading.support import PAPER, SandboxGrader, make_attempt, tar_of, write_suite

FILES = {"evaluation/check.py": "pass", "groundtruth_workspace/paper.pdf": "right", "docs/note.md": "read me"}


def digest_of(suite: Suite, folder: Path) -> str:
    archive = folder / "task.tar"
    archive.unlink(missing_ok=True)
    suite.task_archive(suite.tasks["paper"], archive, sealed=True)
    return evaluator_digest(archive, folder=PurePosixPath(PAPER), names=suite.profile.grading)


def test_digest_does_not_depend_on_how_the_archive_was_packed(tmp_path: Path) -> None:
    suite = write_suite(tmp_path / "checkout", evaluator(REQUIRES_PAPER, **FILES))
    sealed = tmp_path / "sealed.tar"
    with tarfile.open(sealed, "w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted((tmp_path / "checkout" / PAPER).rglob("*"), reverse=True):
            archive.add(path, f"./{path.relative_to(tmp_path / 'checkout' / PAPER)}", recursive=False)
    digest = evaluator_digest(sealed, folder=PurePosixPath(), names=suite.profile.grading)
    assert digest == digest_of(suite, tmp_path)
    assert digest.startswith("sha256:")
    assert len(digest) == 7 + 64


@pytest.mark.parametrize(
    "changed", ["evaluation/check.py", "groundtruth_workspace/paper.pdf", "evaluation/rubric.yaml"]
)
def test_digest_changes_with_every_file_that_grades(tmp_path: Path, changed: str) -> None:
    one = write_suite(tmp_path / "one", evaluator(REQUIRES_PAPER, **FILES))
    other = write_suite(tmp_path / "other", evaluator(REQUIRES_PAPER, **{**FILES, changed: "{}"}))
    assert digest_of(one, tmp_path) != digest_of(other, tmp_path)


def test_digest_of_a_link_is_that_of_its_target_path(tmp_path: Path) -> None:
    suite = write_suite(tmp_path / "checkout", evaluator(REQUIRES_PAPER, **FILES))
    driver = tmp_path / "checkout" / PAPER / "evaluation" / "again.py"
    digests: set[str] = set()
    for target in ("check.py", "main.py"):
        driver.unlink(missing_ok=True)
        driver.symlink_to(target)
        digests.add(digest_of(suite, tmp_path))
    assert len(digests) == 2


def test_digest_ignores_visible_files_and_python_caches(tmp_path: Path) -> None:
    archive = tmp_path / "task.tar"
    names = ("evaluation", "groundtruth_workspace")
    digests: set[str] = set()
    for more in ({}, {"docs/task.md": "x"}, {"evaluation/__pycache__/main.pyc": "x"}, {"evaluation2": "x"}):
        archive.write_bytes(tar_of({"evaluation/main.py": REQUIRES_PAPER, **more}))
        digests.add(evaluator_digest(archive, folder=PurePosixPath(), names=names))
    assert len(digests) == 1


def job_for(tmp_path: Path, captured: CapturedWorkspace, **fields: Any) -> GradingJob:
    suite = write_suite(tmp_path / "checkout", evaluator(REQUIRES_PAPER, **FILES))

    def open_sandbox(network: Network) -> Any:
        raise NotImplementedError

    return GradingJob(
        attempt=make_attempt(),
        suite=suite,
        task=suite.tasks["paper"],
        open_sandbox=open_sandbox,
        captured=captured,
        common=tmp_path / "common.tar",
        deadline_seconds=1,
        log=SuiteHooks().evaluator_log,
        **fields,
    )


def names_of(archive: ArchiveSource) -> list[str]:
    assert isinstance(archive, Path)
    with tarfile.open(archive) as tar:
        return sorted(tar.getnames())


def test_inputs_are_common_credentials_task_and_workspace_in_order(tmp_path: Path) -> None:
    workspace = tmp_path / "captured.tar"
    workspace.write_bytes(tar_of({"paper.pdf": "x", "../escaped": "x"}))
    credentials = (PurePosixPath("configs"), tar_of({"token": "secret"}))
    job = job_for(tmp_path, CapturedWorkspace(workspace, None), credentials=[credentials])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    inputs = prepare_inputs(job, scratch)
    common, secret, task = inputs.archives
    assert common == (PurePosixPath(), job.common)
    assert secret == credentials
    assert task[0] == PurePosixPath()
    assert f"{PAPER}/evaluation/main.py" in names_of(task[1])
    assert inputs.workspace is not None
    assert inputs.refused == ()
    entries = inputs.workspace.streamed().entries()
    assert [member.name for member, _ in entries] == ["workspace", "workspace/paper.pdf"]
    assert inputs.refused == ("../escaped: a path with ..",)
    assert inputs.evaluator_digest == digest_of(job.suite, tmp_path)


def test_sealed_archive_replaces_the_suites_own_files(tmp_path: Path) -> None:
    sealed = tmp_path / "sealed.tar"
    sealed.write_bytes(tar_of({"./evaluation/main.py": "pass"}))
    job = job_for(tmp_path, CapturedWorkspace(None, sealed))
    inputs = prepare_inputs(job, tmp_path)
    assert inputs.archives == [(PurePosixPath(), job.common), (PurePosixPath(PAPER), sealed)]
    assert inputs.evaluator_digest == evaluator_digest(
        sealed, folder=PurePosixPath(), names=job.suite.profile.grading
    )


def test_workspace_is_no_input_when_grading_in_place(tmp_path: Path) -> None:
    job = job_for(tmp_path, CapturedWorkspace(tmp_path / "never-read.tar", None), in_place=True)
    inputs = prepare_inputs(job, tmp_path)
    assert [folder for folder, _ in inputs.archives] == [PurePosixPath()] * 2
    assert inputs.workspace is None
    assert inputs.refused == ()


@pytest.mark.anyio
async def test_verdict_has_the_digest_with_and_without_a_score(grader: SandboxGrader, tmp_path: Path) -> None:
    scored = write_suite(tmp_path / "scored", evaluator(REQUIRES_PAPER))
    endless = write_suite(tmp_path / "endless", evaluator("import time; time.sleep(1000)"))
    with anyio.fail_after(60):
        one = await grader.grade(make_attempt(), scored, {})
        other = await grader.grade(make_attempt(), endless, {}, deadline_seconds=1)
    assert one.evaluator_digest == digest_of(scored, tmp_path)
    assert (other.status, other.evaluator_digest) == ("forfeited", digest_of(endless, tmp_path))
