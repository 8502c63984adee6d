"""Which evaluator graded: what changes the digest, and what does not."""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath

import anyio
import pytest

from decathlon_mcp.grading.digest import evaluator_digest
from decathlon_mcp.suites.suite import Suite
from tests.grading.evaluators import FOUND, evaluator
from tests.grading.scene import PAPER, Grading, attempt_of, pack, write_suite

FILES = {"evaluation/check.py": "pass", "groundtruth_workspace/paper.pdf": "right", "docs/note.md": "read me"}


def pristine(suite: Suite, folder: Path) -> str:
    archive = folder / "task.tar"
    archive.unlink(missing_ok=True)
    suite.task_archive(suite.tasks["paper"], archive, sealed=True)
    return evaluator_digest(archive, folder=PurePosixPath(PAPER), names=suite.profile.grading)


def test_the_same_files_have_the_same_digest_however_they_were_packed(tmp_path: Path) -> None:
    suite = write_suite(tmp_path / "checkout", evaluator(FOUND, **FILES))
    sealed = tmp_path / "sealed.tar"
    with tarfile.open(sealed, "w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted((tmp_path / "checkout" / PAPER).rglob("*"), reverse=True):
            archive.add(path, f"./{path.relative_to(tmp_path / 'checkout' / PAPER)}", recursive=False)
    digest = evaluator_digest(sealed, folder=PurePosixPath(), names=suite.profile.grading)
    assert digest == pristine(suite, tmp_path)
    assert digest.startswith("sha256:")
    assert len(digest) == 7 + 64


@pytest.mark.parametrize(
    "changed", ["evaluation/check.py", "groundtruth_workspace/paper.pdf", "evaluation/rubric.yaml"]
)
def test_a_change_of_what_grades_changes_it(tmp_path: Path, changed: str) -> None:
    one = write_suite(tmp_path / "one", evaluator(FOUND, **FILES))
    other = write_suite(tmp_path / "other", evaluator(FOUND, **{**FILES, changed: "{}"}))
    assert pristine(one, tmp_path) != pristine(other, tmp_path)


def test_a_link_counts_by_its_target(tmp_path: Path) -> None:
    suite = write_suite(tmp_path / "checkout", evaluator(FOUND, **FILES))
    driver = tmp_path / "checkout" / PAPER / "evaluation" / "again.py"
    digests: set[str] = set()
    for target in ("check.py", "main.py"):
        driver.unlink(missing_ok=True)
        driver.symlink_to(target)
        digests.add(pristine(suite, tmp_path))
    assert len(digests) == 2


def test_what_the_agent_may_read_and_pythons_caches_do_not_count(tmp_path: Path) -> None:
    archive = tmp_path / "task.tar"
    names = ("evaluation", "groundtruth_workspace")
    digests: set[str] = set()
    for more in ({}, {"docs/task.md": "x"}, {"evaluation/__pycache__/main.pyc": "x"}, {"evaluation2": "x"}):
        archive.write_bytes(pack({"evaluation/main.py": FOUND, **more}))
        digests.add(evaluator_digest(archive, folder=PurePosixPath(), names=names))
    assert len(digests) == 1


@pytest.mark.anyio
async def test_the_verdict_names_it_whatever_came_of_the_grading(grading: Grading, tmp_path: Path) -> None:
    scored = write_suite(tmp_path / "scored", evaluator(FOUND))
    endless = write_suite(tmp_path / "endless", evaluator("import time; time.sleep(1000)"))
    with anyio.fail_after(60):
        one = await grading.grade(attempt_of(), scored, {})
        other = await grading.grade(attempt_of(), endless, {}, deadline_seconds=1)
    assert one.evaluator_digest == pristine(scored, tmp_path)
    assert (other.status, other.evaluator_digest) == ("timeout", pristine(endless, tmp_path))
