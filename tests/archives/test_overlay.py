"""A task's folder after preprocess, joined with a newer checkout of it."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path, PurePosixPath

import pytest

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.regrade.kept_attempts import content_ids, overlay

FOLDER = PurePosixPath("tasks/train/paper")
FOLDERS = "/"
"""Content of a member that is a folder; `->` begins that of a symlink and `=` that of a hard link."""


def pack(archive: Path, members: Mapping[str, str], prefix: str = "") -> Path:
    with tarfile.open(archive, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"{prefix}{name}")
            if content == FOLDERS:
                info.type = tarfile.DIRTYPE
            elif content.startswith("->"):
                info.type, info.linkname = tarfile.SYMTYPE, content[2:]
            elif content.startswith("="):
                info.type, info.linkname = tarfile.LNKTYPE, f"{prefix}{content[1:]}"
            else:
                info.size = len(content)
            tar.addfile(info, BytesIO(content.encode()))
    return archive


def joined(
    tmp_path: Path, before: Mapping[str, str], after: Mapping[str, str], now: Mapping[str, str]
) -> dict[str, str]:
    """The folder that `overlay` makes, as a mapping like its arguments; links to files have their content."""
    original = pack(tmp_path / "before.tar", before, f"{FOLDER}/")
    checkout = pack(tmp_path / "now.tar", now, f"{FOLDER}/")
    preprocessed = pack(tmp_path / "after.tar", after, "./")
    into = tmp_path / "joined.tar"
    overlay(checkout, preprocessed, into, folder=FOLDER, original=content_ids(original, FOLDER))
    result: dict[str, str] = {}
    with tarfile.open(into) as tar:
        for member in tar:
            assert member.name not in result
            if member.isdir():
                result[member.name] = FOLDERS
            elif member.issym():
                result[member.name] = f"->{member.linkname}"
            else:
                file = tar.extractfile(member)
                assert file is not None
                result[member.name] = file.read().decode()
    return result


def test_an_edited_evaluator_meets_the_groundtruth_that_preprocess_made(tmp_path: Path) -> None:
    before = {"evaluation": "/", "evaluation/main.py": "old", "template": "t"}
    after = {**before, "groundtruth": "/", "groundtruth/answer": "generated"}
    now = {"evaluation": "/", "evaluation/main.py": "new", "template": "t"}
    assert joined(tmp_path, before, after, now) == {
        "evaluation": "/",
        "evaluation/main.py": "new",
        "template": "t",
        "groundtruth": "/",
        "groundtruth/answer": "generated",
    }


def test_a_file_that_preprocess_changed_stays_as_it_left_it(tmp_path: Path) -> None:
    assert joined(tmp_path, {"a": "1"}, {"a": "2"}, {"a": "3"}) == {"a": "2"}


def test_a_file_that_preprocess_removed_stays_absent(tmp_path: Path) -> None:
    assert joined(tmp_path, {"a": "1", "b": "1"}, {"b": "1"}, {"a": "2", "b": "2"}) == {"b": "2"}


def test_files_that_the_checkout_gained_and_lost_follow_the_checkout(tmp_path: Path) -> None:
    assert joined(tmp_path, {"lost": "1"}, {"lost": "1"}, {"gained": "2"}) == {"gained": "2"}


def test_an_unchanged_checkout_gives_what_preprocess_left(tmp_path: Path) -> None:
    before = {"evaluation": "/", "evaluation/main.py": "old", "link": "->evaluation/main.py"}
    after = {"evaluation": "/", "evaluation/main.py": "old", "link": "->evaluation/main.py", "made": "x"}
    assert joined(tmp_path, before, after, before) == after


def test_caches_of_the_old_evaluator_are_left_out(tmp_path: Path) -> None:
    after = {"main.py": "old", "__pycache__": "/", "__pycache__/main.cpython-311.pyc": "old"}
    assert joined(tmp_path, {"main.py": "old"}, after, {"main.py": "new"}) == {"main.py": "new"}


def test_a_new_hard_link_has_the_content_that_preprocess_linked(tmp_path: Path) -> None:
    after = {"a": "1", "copy": "=a", "b": "1", "same": "=b"}
    before = {"a": "1", "b": "1", "same": "1"}
    now = {"a": "2", "b": "2", "same": "2"}
    assert joined(tmp_path, before, after, now) == {"a": "1", "copy": "1", "b": "2", "same": "2"}


def test_a_folder_that_became_a_file_hides_what_was_in_it(tmp_path: Path) -> None:
    before = {"x": "/", "x/old": "1"}
    now = {"x": "/", "x/old": "1", "x/new": "2"}
    assert joined(tmp_path, before, {"x": "a file"}, now) == {"x": "a file"}


def test_a_folder_to_which_preprocess_added_something_is_joined_with_the_checkouts(tmp_path: Path) -> None:
    before = {"x": "/", "x/old": "1"}
    after = {**before, "x/made": "1"}
    assert joined(tmp_path, before, after, {"x": "/", "x/old": "2"}) == {**after, "x/old": "2"}
    assert "x" not in joined(tmp_path, before, after, {"x": "a file"}), "what preprocess made is in it"


def test_a_file_that_became_a_folder_in_preprocess_hides_the_file(tmp_path: Path) -> None:
    after = {"x": "/", "x/made": "1"}
    assert joined(tmp_path, {"x": "a file"}, after, {"x": "another"}) == after


def test_a_member_that_leads_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError):
        joined(tmp_path, {}, {"../../evil": "1"}, {})
