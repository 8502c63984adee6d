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


EVALUATOR = {"evaluation": "/", "evaluation/main.py": "old", "template": "t", "link": "->template"}
MADE = {"groundtruth": "/", "groundtruth/answer": "generated"}
FOLDER_X = {"x": "/", "x/old": "1"}
MADE_IN_X = {**FOLDER_X, "x/made": "1"}
Files = dict[str, str]
CASES: dict[str, tuple[Files, Files, Files, Files]] = {
    "an edited evaluator meets what preprocess made": (
        EVALUATOR,
        {**EVALUATOR, **MADE},
        {**EVALUATOR, "evaluation/main.py": "new"},
        {**EVALUATOR, **MADE, "evaluation/main.py": "new"},
    ),
    "an unchanged checkout": (EVALUATOR, {**EVALUATOR, **MADE}, EVALUATOR, {**EVALUATOR, **MADE}),
    "changed by preprocess": ({"a": "1"}, {"a": "2"}, {"a": "3"}, {"a": "2"}),
    "removed by preprocess": ({"a": "1", "b": "1"}, {"b": "1"}, {"a": "2", "b": "2"}, {"b": "2"}),
    "gained and lost by the checkout": ({"lost": "1"}, {"lost": "1"}, {"gained": "2"}, {"gained": "2"}),
    "caches of the old evaluator": (
        {"main.py": "old"},
        {"main.py": "old", "__pycache__": "/", "__pycache__/main.cpython-311.pyc": "old"},
        {"main.py": "new"},
        {"main.py": "new"},
    ),
    "a new hard link has the content that preprocess linked": (
        {"a": "1", "b": "1", "same": "1"},
        {"a": "1", "copy": "=a", "b": "1", "same": "=b"},
        {"a": "2", "b": "2", "same": "2"},
        {"a": "1", "copy": "1", "b": "2", "same": "2"},
    ),
    "a folder became a file": (FOLDER_X, {"x": "a file"}, {**FOLDER_X, "x/new": "2"}, {"x": "a file"}),
    "a file became a folder": ({"x": "a file"}, MADE_IN_X, {"x": "another"}, MADE_IN_X),
    "joined folders": (FOLDER_X, MADE_IN_X, {**FOLDER_X, "x/old": "2"}, {**MADE_IN_X, "x/old": "2"}),
}


@pytest.mark.parametrize(("before", "after", "now", "expected"), CASES.values(), ids=CASES)
def test_what_preprocess_changed_stays_and_the_rest_is_the_checkouts(
    tmp_path: Path, before: Files, after: Files, now: Files, expected: Files
) -> None:
    assert joined(tmp_path, before, after, now) == expected


def test_a_member_that_leads_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError):
        joined(tmp_path, {}, {"../../evil": "1"}, {})
