"""The archives of a grading, and the digest of the evaluator in them."""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath

import anyio
import pytest

from decathlon_mcp.grading.inputs import evaluator_digest
from decathlon_mcp.suites.suite import Suite
from tests.grading.evaluators import REQUIRES_PAPER, evaluator
from tests.grading.support import PAPER, SandboxGrader, make_attempt, write_suite

FILES = {"evaluation/check.py": "pass", "groundtruth_workspace/paper.pdf": "right", "docs/note.md": "read me"}


def digest_of(suite: Suite, folder: Path) -> str:
    archive = folder / "task.tar"
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


@pytest.mark.anyio
async def test_verdict_has_the_digest_with_and_without_a_score(grader: SandboxGrader, tmp_path: Path) -> None:
    scored = write_suite(tmp_path / "scored", evaluator(REQUIRES_PAPER))
    endless = write_suite(tmp_path / "endless", evaluator("import time; time.sleep(1000)"))
    with anyio.fail_after(60):
        one = await grader.grade(make_attempt(), scored, {})
        other = await grader.grade(make_attempt(), endless, {}, deadline_seconds=1)
    assert one.evaluator_digest == digest_of(scored, tmp_path)
    assert (other.status, other.evaluator_digest) == ("forfeited", digest_of(endless, tmp_path))
