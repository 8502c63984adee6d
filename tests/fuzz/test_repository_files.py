"""Generated files of repositories lead git to no file outside of the workspace."""

from __future__ import annotations

import shutil

import pytest

from tests.fuzz.repository_files import run


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_no_files_lead_git_out_of_the_workspace() -> None:
    assert run(20) >= 20
