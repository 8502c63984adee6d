"""The archives that go into sandboxes, and what is removed there before play."""

from __future__ import annotations

import logging
import os
import tarfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pytest

from decathlon_mcp.errors import SuiteError

if TYPE_CHECKING:
    from decathlon_mcp.suites.suite import Suite
    from tests.suites.conftest import Checkout

TASK = "tasks/finalpool/find-paper"


def members(archive: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(archive) as tar:
        return {member.name: member for member in tar.getmembers()}


def content(archive: Path, name: str) -> str:
    with tarfile.open(archive) as tar:
        file = tar.extractfile(name)
        assert file is not None
        return file.read().decode()


def task_archive(suite: Suite, into: Path, *, sealed: bool) -> dict[str, tarfile.TarInfo]:
    suite.task_archive(suite.tasks["find-paper"], into, sealed=sealed)
    return members(into)


@pytest.fixture
def populated(checkout: Checkout) -> Checkout:
    checkout.task(
        files={
            "preprocess/main.py": "",
            "groundtruth_workspace/answer.txt": "42",
            "initial_workspace/a/question.txt": "?",
            "evaluation/__pycache__/main.cpython-312.pyc": "",
            "rubric.yaml": "weights: {a: 1}",
            "token_key_session.py": "",
        }
    )
    checkout.task("other", files={"groundtruth_workspace/answer.txt": "43"})
    return checkout


DATA = (".git/HEAD", ".git/objects/ab/cd", "__pycache__/kept.pyc", "a/__pycache__/b", ".DS_Store", "b/.git")


@pytest.mark.parametrize("folder", ["initial_workspace", "initial_workspace_cn", "groundtruth_workspace"])
def test_a_tasks_data_is_whole(populated: Checkout, tmp_path: Path, folder: str) -> None:
    """Upstream copies it whole: a task may be about a repository."""
    for name in DATA:
        populated.write(f"{TASK}/{folder}/{name}", name)
        populated.write(f"{TASK}/evaluation/{folder}/{name}", name)
    suite = populated.load()
    found = task_archive(suite, tmp_path / "t.tar", sealed=True)
    assert [name for name in DATA if f"{TASK}/{folder}/{name}" not in found] == []
    assert [name for name in DATA if f"{TASK}/evaluation/{folder}/{name}" in found] == []
    before = suite.revision_of(suite.tasks["find-paper"])
    populated.write(f"{TASK}/{folder}/.git/HEAD", "another commit")
    assert suite.revision_of(suite.tasks["find-paper"]) != before
    before = suite.revision_of(suite.tasks["find-paper"])
    populated.write(f"{TASK}/evaluation/__pycache__/other", "")
    assert suite.revision_of(suite.tasks["find-paper"]) == before


def test_a_task_archive_contains_the_task_and_the_packages_above_it(
    populated: Checkout, tmp_path: Path
) -> None:
    populated.write("tasks/__init__.py")
    (populated.path / TASK / "initial_workspace" / "empty").mkdir()
    assert list(task_archive(populated.load(), tmp_path / "t.tar", sealed=True)) == [
        "tasks/__init__.py",
        TASK,
        f"{TASK}/docs",
        f"{TASK}/docs/task.md",
        f"{TASK}/evaluation",
        f"{TASK}/evaluation/main.py",
        f"{TASK}/groundtruth_workspace",
        f"{TASK}/groundtruth_workspace/answer.txt",
        f"{TASK}/initial_workspace",
        f"{TASK}/initial_workspace/a",
        f"{TASK}/initial_workspace/a/question.txt",
        f"{TASK}/initial_workspace/empty",
        f"{TASK}/preprocess",
        f"{TASK}/preprocess/main.py",
        f"{TASK}/rubric.yaml",
        f"{TASK}/task_config.json",
        f"{TASK}/token_key_session.py",
    ]


def test_an_archive_without_sealed_files_lacks_the_evaluator_and_groundtruth(
    populated: Checkout, tmp_path: Path
) -> None:
    named = task_archive(populated.load(), tmp_path / "t.tar", sealed=False)
    assert not [name for name in named if "evaluation" in name or "groundtruth" in name or "rubric" in name]
    assert f"{TASK}/initial_workspace/a/question.txt" in named


def test_the_common_archive_contains_shared_folders_and_no_task(populated: Checkout, tmp_path: Path) -> None:
    populated.write("configs/users.json", "{}")
    populated.write("utils/general/helper.py")
    populated.write("deployment/k8s/up.sh")
    populated.write("deployment/secret/down.sh")
    populated.write("node_modules/x/index.js")
    populated.write(".git/HEAD")
    populated.load().common_archive(tmp_path / "c.tar")
    assert list(members(tmp_path / "c.tar")) == [
        "configs",
        "configs/users.json",
        "deployment/k8s",
        "deployment/k8s/up.sh",
        "utils",
        "utils/general",
        "utils/general/helper.py",
    ]


def test_missing_token_files_are_replaced_by_their_examples(populated: Checkout, tmp_path: Path) -> None:
    populated.write("configs/global_configs_example.py", "example = 1")
    populated.write("configs/token_key_session_example.py", "example = 2")
    populated.write("configs/token_key_session.py", "own = 3")
    populated.load().common_archive(tmp_path / "c.tar")
    assert content(tmp_path / "c.tar", "configs/global_configs.py") == "example = 1"
    assert content(tmp_path / "c.tar", "configs/token_key_session.py") == "own = 3"


def test_links_out_of_the_checkout_are_left_out_and_others_stay_links(
    populated: Checkout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("k")
    folder = populated.path / TASK / "initial_workspace"
    (folder / "inner").symlink_to("a/question.txt")
    (folder / "neighbour").symlink_to("../../other/groundtruth_workspace/answer.txt")
    (folder / "file").symlink_to(secret / "key")
    (folder / "folder").symlink_to(secret)
    (folder / "relative").symlink_to(os.path.relpath(secret / "key", folder))
    with caplog.at_level(logging.WARNING):
        named = task_archive(populated.load(), tmp_path / "t.tar", sealed=True)
    links = {name: member.linkname for name, member in named.items() if member.issym()}
    assert links == {
        f"{TASK}/initial_workspace/inner": "a/question.txt",
        f"{TASK}/initial_workspace/neighbour": "../../other/groundtruth_workspace/answer.txt",
    }
    assert not [name for name in named if name.endswith(("/key", "/file", "/folder", "/relative"))]
    assert len(caplog.records) == 3


def test_a_common_folder_that_leads_out_of_the_checkout_is_an_error(
    populated: Checkout, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    (populated.path / "configs").symlink_to(tmp_path / "shared")
    with pytest.raises(SuiteError, match="configs leads out of the checkout"):
        populated.load().common_archive(tmp_path / "c.tar")


def test_every_entry_is_sealed_unless_a_token_value_points_to_it(populated: Checkout) -> None:
    populated.write(f"{TASK}/files/poste.json")
    populated.write(f"{TASK}/email_config.json")
    populated.write(f"{TASK}/verify_groundtruth.py")
    suite = populated.load()
    assert {"evaluation", "groundtruth_workspace", "preprocess", "initial_workspace"} <= {
        *suite.profile.sealed
    }
    values = {
        "token.emails_config_file": f"/w/{TASK}/files/poste.json",
        "token.relative": f"{TASK}/email_config.json",
        "token.sneaky": f"/w/{TASK}/groundtruth_workspace/bucket.txt",
        "token.word": "null",
    }
    sealed = suite.names_to_seal(suite.tasks["find-paper"], root=PurePosixPath("/w"), values=values)
    assert {"evaluation", "groundtruth_workspace", "verify_groundtruth.py", "token_key_session.py"} <= {
        *sealed
    }
    assert not {"files", "email_config.json"} & {*sealed}
