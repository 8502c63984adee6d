"""Traces of hidden folders: repositories, lists of installed files, and other copies of the bundled suite."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.sandboxes.host import answer_traces, host_files
from decathlon_mcp.sandboxes.host.answer_traces import find_traces, repositories_of
from decathlon_mcp.sandboxes.host.host_files import HostFiles

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")


def git(folder: Path, *words: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([*GIT, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(name="suite")
def suite_in_a_repository(tmp_path: Path) -> Path:
    suite = tmp_path / "repository" / "suites" / "mine"
    suite.mkdir(parents=True)
    (suite / "answer.json").write_text("{}")
    git(tmp_path / "repository", "init", "-q")
    git(tmp_path / "repository", "add", ".")
    git(tmp_path / "repository", "commit", "-q", "-m", "all")
    return suite


def test_repositories_of_a_suite_are_found_wherever_its_history_is(suite: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    assert list(repositories_of(suite)) == [repository / ".git"]
    git(repository, "worktree", "add", "-q", str(tmp_path / "worktree"))
    found = {path.resolve() for path in repositories_of(tmp_path / "worktree" / "suites")}
    assert found == {repository / ".git", repository / ".git" / "worktrees" / "worktree"}
    git(tmp_path, "clone", "-q", "--shared", str(repository), "shared")
    found = {path.resolve() for path in repositories_of(tmp_path / "shared" / "suites")}
    assert found == {tmp_path / "shared" / ".git", repository / ".git" / "objects"}
    git(tmp_path / "super", "init", "-q")
    git(tmp_path / "super", "submodule", "add", "-q", str(repository), "inner")
    found = {path.resolve() for path in repositories_of(tmp_path / "super" / "inner")}
    assert found == {tmp_path / "super" / ".git", tmp_path / "super" / ".git" / "modules" / "inner"}


def test_repositories_of_what_a_program_sees_are_hidden(suite: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    files = HostFiles.for_program([suite], [], [repository], b"")
    assert set(files.hidden) == {suite, repository / ".git"}
    # What is beside the folders of a Python is not there at all.
    (repository / "lib").mkdir()
    files = HostFiles.for_program([suite], [repository], [], b"")
    assert repository / "lib" in files.shown
    assert repository not in files.shown
    assert files.hidden == ()


def test_lists_of_files_lose_the_lines_about_hidden_ones_and_the_others_stay(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    for name in ("mine-1.dist-info", "other-1.dist-info", "old.egg-info"):
        (site / name).mkdir(parents=True)
    (site / "mine" / "suite").mkdir(parents=True)
    record = site / "mine-1.dist-info" / "RECORD"
    record.write_bytes(
        b'mine/suite/a.json,sha256=AAAA,3\r\n"mine/suite/b,c.json",sha256=BBBB,3\r\n'
        b"mine/suites.py,sha256=CCCC,3\r\n../mine/../site-packages/mine/suite/d,sha256=DDDD,1\r\n"
        b"mine-1.dist-info/direct_url.json,sha256=EEEE,9\r\nmine-1.dist-info/RECORD,,\r\n"
    )
    (site / "mine-1.dist-info" / "direct_url.json").write_text('{"archive_info": {"hash": "sha256=0"}}')
    (site / "other-1.dist-info" / "RECORD").write_text("mine/suites.py,sha256=CCCC,3\n")
    (site / "other-1.dist-info" / "direct_url.json").write_text('{"archive_info": {"hash": "sha256=0"}}')
    (site / "old.egg-info" / "SOURCES.txt").write_text("setup.py\nsrc/mine/suite/a.json\n")
    (site / "old.egg-info" / "installed-files.txt").write_text("../mine/suite/a.json\n../mine/x.py\n")
    traces = find_traces([site], [site / "mine" / "suite"])
    assert traces.files == {
        record: b"mine/suites.py,sha256=CCCC,3\nmine-1.dist-info/direct_url.json,,\n"
        b"mine-1.dist-info/RECORD,,\n",
        site / "mine-1.dist-info" / "direct_url.json": answer_traces.NO_ORIGIN,
        site / "old.egg-info" / "SOURCES.txt": b"setup.py\n",
        site / "old.egg-info" / "installed-files.txt": b"../mine/x.py\n",
    }


def test_other_installations_and_archives_of_the_bundled_suite_are_hidden(tmp_path: Path) -> None:
    """An agent's own environment may have this project, whose client it uses."""
    site = tmp_path / "agent" / ".venv" / "lib" / "python3.11" / "site-packages"
    (site / "decathlon_mcp" / "starter" / "suite").mkdir(parents=True)
    (site / "decathlon_mcp-0.1.0.dist-info").mkdir()
    record = site / "decathlon_mcp-0.1.0.dist-info" / "RECORD"
    record.write_text("decathlon_mcp/starter/suite/a,sha256=AAAA,3\ndecathlon_mcp/app.py,sha256=B,1\n")
    wheel = tmp_path / "agent" / "dist" / "decathlon_mcp-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"answers")
    traces = find_traces([tmp_path], [tmp_path / "elsewhere"])
    assert traces.folders == (site / "decathlon_mcp" / "starter",)
    assert traces.files == {wheel: b"", record: b"decathlon_mcp/app.py,sha256=B,1\n"}


def test_copy_of_the_bundled_suite_that_an_image_has_in_usr_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`COPY . /usr/src/app`, and the package installed somewhere else."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    monkeypatch.setattr(host_files, "USR", usr := tmp_path / "usr")
    copies = [usr / "src" / "app", usr / "app", usr / "local" / "src" / "app"]
    for copy in copies:
        (copy / "decathlon_mcp" / "starter" / "suite").mkdir(parents=True)
        git(copy, "init", "-q")
    (usr / "share" / "doc").mkdir(parents=True)
    files = HostFiles.for_program([tmp_path / "suite"], [], [], b"")
    expected = {path for copy in copies for path in (copy / ".git", copy / "decathlon_mcp" / "starter")}
    assert set(files.hidden) == expected


def test_search_is_bounded_and_what_cannot_be_searched_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path
    for _ in range(answer_traces.MAX_DEPTH + 2):
        folder = folder / "d"
    folder.mkdir(parents=True)
    with pytest.raises(ProviderUnavailableError, match="too many files are shown"):
        find_traces([tmp_path], [tmp_path / "hidden"])
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "again").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "loop" / "decathlon_mcp-1.zip")
    traces = find_traces([tmp_path / "loop"], [tmp_path / "hidden"])
    assert (traces.folders, traces.files) == ((), {})
    monkeypatch.setattr(answer_traces, "MAX_ENTRIES", 1)
    with pytest.raises(ProviderUnavailableError, match="too many files are shown"):
        find_traces([tmp_path / "loop"], [tmp_path / "hidden"])
