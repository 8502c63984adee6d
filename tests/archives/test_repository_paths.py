"""Paths in repositories of a workspace: git follows none of them out of it, and those inside still work.

Every path is tried with git itself, in the workspace as it was and in the one that the grader gets.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

from decathlon_mcp.archives.repositories import Repositories
from decathlon_mcp.grading.grader import REPOSITORY_ENVIRONMENT
from tests.archives.test_repositories import cleaned, git, repository

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

SECRET = "canary"
"""In a file, its name and a commit outside of the workspace."""
LOG = (("log", "-1", "--patch"),)
FETCH = (("fetch",), ("log", "-1", "--patch", "FETCH_HEAD"))
Commands = tuple[tuple[str, ...], ...]
Prepare = Callable[[Path, Path], Commands]
"""Makes a repository refer to another one outside; returns the commands that an evaluator calls in it."""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    folder = repository(tmp_path / "truth")
    (folder / SECRET).write_text(SECRET)
    git(folder, "add", SECRET)
    git(folder, "commit", "-q", "-m", SECRET)
    (folder / f"{SECRET}.new").write_text("")
    return folder


def relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path, folder)


def git_file(path: Callable[[Path, Path], str]) -> Prepare:
    def prepare(folder: Path, truth: Path) -> Commands:
        shutil.rmtree(folder / ".git")
        (folder / ".git").write_text(f"gitdir: {path(truth / '.git', folder)}\n")
        return LOG

    return prepare


def linked_git_file(folder: Path, truth: Path) -> Commands:
    """A relative path that leads out only from the link's folder."""
    shutil.rmtree(folder / ".git")
    deep = folder / "a/b/truth"
    deep.mkdir(parents=True)
    (deep / "notes").write_text("gitdir: ../../truth/.git\n")
    (folder / ".git").symlink_to("a/b/truth/notes")
    return LOG


def link_to_a_git_file(folder: Path, truth: Path) -> Commands:
    deep = folder / "a/b/c"
    deep.mkdir(parents=True)
    (deep / ".git").write_text("gitdir: ../../truth/.git\n")
    (folder / "link").symlink_to("a/b/c/.git")
    git(folder, "config", "remote.origin.url", str(folder / "link"))
    return FETCH


def file_that_git_takes_for_a_repository(folder: Path, truth: Path) -> Commands:
    (folder / "notes.txt").write_text(f"gitdir: {truth}/.git")
    git(folder, "config", "remote.origin.url", str(folder / "notes.txt"))
    return FETCH


def common_folder(folder: Path, truth: Path) -> Commands:
    (folder / ".git/commondir").write_text(f"{truth}/.git\n")
    return LOG


def worktree_of_the_workspace(folder: Path, truth: Path) -> Commands:
    """A worktree's own files are in the workspace, the others are not."""
    git(folder, "worktree", "add", "-q", "../tree")
    (folder / ".git/worktrees/tree/commondir").write_text(f"{truth}/.git\n")
    return (("-C", "../tree", "log", "-1", "--patch", "--all"),)


def alternates(line: str) -> Prepare:
    def prepare(folder: Path, truth: Path) -> Commands:
        (folder / ".git/objects/info").mkdir(exist_ok=True)
        text = line.format(absolute=truth, relative=relative(truth, folder / ".git/objects"))
        (folder / ".git/objects/info/alternates").write_text(text)
        return (("show", git(truth, "rev-parse", "HEAD").strip()),)

    return prepare


def alternates_behind_a_link(folder: Path, truth: Path) -> Commands:
    """The path stays inside from the folder of the file, and leads out from the one of the link."""
    deep = folder / "a/b/c/d/info"
    deep.mkdir(parents=True)
    (deep / "alternates").write_text("../../../../truth/.git/objects\n")
    shutil.rmtree(folder / ".git/objects/info")
    (folder / ".git/objects/info").symlink_to("../../a/b/c/d/info")
    return (("show", git(truth, "rev-parse", "HEAD").strip()),)


def multi_pack_index(folder: Path, truth: Path) -> Commands:
    """The index of all packs has their paths."""
    git(truth, "gc", "-q")
    (pack,) = (truth / ".git/objects/pack").glob("*.pack")
    for file in (pack, pack.with_suffix(".idx")):
        shutil.copy(file, folder / ".git/objects/pack")
    git(folder, "multi-pack-index", "write")
    outside = truth.parent / "packs"
    outside.mkdir()
    for suffix in (".pack", ".idx"):
        (folder / ".git/objects/pack" / pack.name).with_suffix(suffix).unlink()
        shutil.copy(pack.with_suffix(suffix), (outside / "p").with_suffix(suffix))
    index = folder / ".git/objects/pack/multi-pack-index"
    name, path = f"{pack.stem}.idx", relative(outside, index.parent)
    path += "/" * (len(name) - len(path) - len("p.idx")) + "p.idx"
    content = index.read_bytes()
    assert name.encode() in content
    index.chmod(0o644)
    index.write_bytes(content.replace(name.encode(), path.encode()))
    return (("show", git(truth, "rev-parse", "HEAD").strip()),)


def setting(key: str, value: str, commands: Commands = FETCH) -> Prepare:
    def prepare(folder: Path, truth: Path) -> Commands:
        git(folder, "config", key, value.format(absolute=truth, relative=relative(truth, folder)))
        return commands

    return prepare


def relative_to_a_worktree(folder: Path, truth: Path) -> Commands:
    """The path stays inside from the repository, and leads out from its other working tree."""
    git(folder, "worktree", "add", "-q", "--detach", "-f", "../tree")
    deep = folder.parent / "a/b/library"
    deep.parent.mkdir(parents=True)
    folder.rename(deep)
    (folder.parent / "tree/.git").rename(folder.parent / ".git")
    (folder.parent / ".git").write_text(f"gitdir: {deep}/.git/worktrees/tree\n")
    (deep / ".git/worktrees/tree/gitdir").write_text(f"{folder.parent}/.git\n")
    git(deep, "config", "remote.origin.url", "../truth")
    folder.mkdir()
    return (("-C", "..", "fetch", "origin"), ("-C", "..", "log", "-1", "--patch", "FETCH_HEAD"))


def submodule(folder: Path, truth: Path) -> Commands:
    head = git(truth, "rev-parse", "HEAD").strip()
    git(folder, "update-index", "--add", "--cacheinfo", f"160000,{head},sub")
    (folder / ".gitmodules").write_text(f'[submodule "sub"]\n\tpath = sub\n\turl = {truth}\n')
    allow = ("-c", "protocol.file.allow=always")
    return ((*allow, "submodule", "update", "--init"), ("-C", "sub", "log", "-1", "--patch"))


OTHER_TREE: Commands = (("ls-files", "--others"), ("grep", "--no-index", SECRET))
ESCAPES: dict[str, Prepare] = {
    "git-file-absolute": git_file(lambda path, folder: str(path)),
    "git-file-relative": git_file(relative),
    "linked-git-file": linked_git_file,
    "link-to-a-git-file": link_to_a_git_file,
    "file-with-another-name": file_that_git_takes_for_a_repository,
    "common-folder": common_folder,
    "worktree": worktree_of_the_workspace,
    "alternates-relative": alternates("{relative}/.git/objects\n"),
    "alternates-quoted": alternates('"{relative}\\057.git/objects"\n'),
    "alternates-behind-a-link": alternates_behind_a_link,
    "multi-pack-index": multi_pack_index,
    "remote-relative": setting("remote.origin.url", "{relative}"),
    "remote-file-encoded": setting("remote.origin.url", "file://{absolute}/%2e%67it"),
    "remote-of-a-branch": setting("branch.main.remote", "{absolute}", (("fetch",), *FETCH[1:])),
    "remote-relative-to-a-worktree": relative_to_a_worktree,
    "submodule": submodule,
    "working-tree-relative": setting("core.worktree", "../../../truth", OTHER_TREE),
    "revisions-to-ignore": setting(
        "blame.ignoreRevsFile", "{absolute}/" + SECRET, (("blame", "HEAD", "file.txt"),)
    ),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_git_does_not_leave_the_workspace(workspace: Path, tmp_path: Path, truth: Path, name: str) -> None:
    folder = repository(workspace / "library")
    (folder / "a").mkdir()
    (folder / "a/file").write_text("")
    commands = ESCAPES[name](folder, truth)
    untouched = tmp_path / "untouched"
    shutil.copytree(workspace, untouched, symlinks=True)
    reports = cleaned(workspace, tmp_path / "before")
    # A commit's id in a message is no content.
    assert SECRET not in "".join(git(folder, *command) for command in commands)
    assert reports or name == "alternates-behind-a-link", "the change is not reported"
    shutil.rmtree(workspace)
    untouched.rename(workspace)
    output = "".join(git(folder, *command) for command in commands)
    assert SECRET in output, f"the attack does not work: {output}"


def test_submodule_that_only_a_commit_names_is_not_cloned(
    workspace: Path, tmp_path: Path, truth: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = repository(workspace / "library")
    submodule(folder, truth)
    git(folder, "add", ".gitmodules")
    git(folder, "commit", "-q", "-m", "submodule")
    (folder / ".gitmodules").unlink()
    cleaned(workspace, tmp_path / "before")
    monkeypatch.setattr("tests.archives.test_repositories.GIT", {**os.environ, **REPOSITORY_ENVIRONMENT})
    assert "not allowed" in git(folder, "submodule", "update", "--init")
    assert not (folder / "sub/.git").exists()


LOCATION = "/episode/workspace"


@pytest.mark.parametrize(
    ("location", "remains"),
    [
        ("origin", True),
        ("https://example.org/a/b.git", True),
        ("git@example.org:ann/a.git", True),
        (f"{LOCATION}/store.git", True),
        (f"file://{LOCATION}/store.git", True),
        ("../truth", False),
        ("/episode/tasks", False),
        (f"{LOCATION}-2", False),
        (f"/{LOCATION}/a", False),
        (f"file://{LOCATION}/%2e%2e/tasks", False),
        ("https://example.org/../../../../tasks", False),
        ("a/b/../../../tasks", False),
        ("~/tasks", False),
        ("ext::cat /episode/tasks", False),
    ],
)
def test_remotes_on_other_machines_and_in_the_workspace_remain(location: str, remains: bool) -> None:
    repositories = Repositories(["a/objects/x", "a/refs/x"], PurePosixPath(LOCATION))
    reduce = repositories.treatment("a/config", None).reduce
    assert reduce is not None
    for key in ('[remote "origin"]\n\turl', '[submodule "a"]\n\turl', '[branch "main"]\n\tpushRemote'):
        content = f'{key} = "{location}"\n'.encode()
        kept, removed = reduce(content, "a/config")
        assert (b"\t" in kept, len(removed)) == ((True, 0) if remains else (False, 1)), (location, key)


def test_files_with_paths_inside_are_unchanged(workspace: Path, tmp_path: Path) -> None:
    folder = repository(workspace / "library")
    git(folder, "remote", "add", "origin", "https://example.org/a.git")
    allow = ("-c", "protocol.file.allow=always")
    git(folder, *allow, "submodule", "--quiet", "add", "./", "deep/module")
    git(folder, *allow, "submodule", "--quiet", "add", str(repository(workspace / "other")), "deep/other")
    git(folder, "commit", "-q", "-m", "modules")
    git(folder, "worktree", "add", "-q", "-b", "topic", "../tree")
    git(folder, "gc", "-q")
    (workspace / "gitdir.txt").write_text("gitdir: a word that git knows\n")
    files = {path: path.read_bytes() for path in _files(workspace)}
    assert {path.name for path in files} > {".git", ".gitmodules", "commondir", "gitdir", "config"}
    assert cleaned(workspace, tmp_path / "before") == []
    assert {path: path.read_bytes() for path in _files(workspace)} == files


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def test_lists_of_a_reftable_name_files_next_to_them() -> None:
    reduce = Repositories([], PurePosixPath(LOCATION)).treatment("a/reftable/tables.list", None).reduce
    assert reduce is not None
    kept, removed = reduce(b"0x1-0x2-3.ref\n../../../tasks/a.ref\n", "a/reftable/tables.list")
    assert (kept, removed) == (b"0x1-0x2-3.ref\n", ["a path that leads out"])
