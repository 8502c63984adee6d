"""Repositories in a workspace: what git would run is removed, and honest commands print the same as before.

Every attack is tried with git itself, in the workspace as it was and in the one that the grader gets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from decathlon_mcp.archives.packing import pack_folder
from decathlon_mcp.archives.repositories import MAX_FILE_BYTES, Repositories, reduce_config
from tests.archives.cleaning import clean_workspace, extract

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

GIT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
    "PATH": os.environ["PATH"],
}
QUESTIONS = (
    ("log", "-1", "--stat"),
    ("status", "--porcelain=v2", "--branch"),
    ("diff",),
    ("show", "--pretty=fuller", "HEAD"),
    ("branch", "--all", "--verbose"),
    ("remote", "--verbose"),
    ("config", "user.name"),
    ("log", "--all", "--graph", "--oneline", "--decorate"),
    ("stash", "list"),
    ("submodule", "status"),
    ("worktree", "list", "--porcelain"),
)


def git(folder: Path, *arguments: str) -> str:
    """The output of a git command, with its errors."""
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env={**GIT, "HOME": str(folder.parent)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    return done.stdout.decode("utf-8", "backslashreplace")


def repository(folder: Path) -> Path:
    """A repository with two commits and one change."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "user.name", 'Ann; #1 \\ "A"')
    git(folder, "config", "user.email", "ann@example.org")
    for text in ("one\n", "one\ntwo\n"):
        (folder / "file.txt").write_text(text)
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", f"add {text.split()[-1]}")
    (folder / "file.txt").write_text("three\n")
    return folder


def cleaned(workspace: Path, into: Path) -> list[str]:
    """The workspace as the grader gets it, at the same path; the original is moved to `into`. The reports."""
    archive, clean = into.with_suffix(".tar"), into.with_suffix(".clean.tar")
    pack_folder(workspace, archive, 1 << 30, below=workspace.parent)
    root = PurePosixPath(workspace.parent)
    reports = clean_workspace(
        archive, clean, prefix=workspace.name, limit_bytes=1 << 30, limit_members=10_000, root=root
    )
    workspace.rename(into)
    with tarfile.open(clean) as tar:
        extract(tar, workspace.parent)
    return reports


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


def with_everything_honest(workspace: Path) -> list[Path]:
    """Repositories with remotes, branches, a stash, a submodule, a worktree, sparse files and alternates."""
    library = repository(workspace / "library")
    bare = workspace / "library.store"
    git(workspace, "clone", "-q", "--bare", "library", str(bare))
    clone = workspace / "clone"
    git(workspace, "clone", "-q", "--shared", str(bare), str(clone))
    git(clone, "remote", "add", "upstream", "https://example.org/a.git")
    git(clone, "branch", "topic", "HEAD~1")
    git(clone, "tag", "v1")
    (clone / "file.txt").write_text("stashed\n")
    git(clone, "-c", "user.name=a", "-c", "user.email=a@b", "stash")
    git(clone, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(bare), "sub/module")
    git(clone, "worktree", "add", "-q", "../tree", "topic")
    git(clone, "sparse-checkout", "set", "--no-cone", "/*")
    return [library, bare, clone, clone / "sub/module", workspace / "tree"]


def test_honest_commands_print_the_same(workspace: Path, tmp_path: Path) -> None:
    folders = with_everything_honest(workspace)
    before = {(folder, question): git(folder, *question) for folder in folders for question in QUESTIONS}
    configurations = {path: path.read_bytes() for path in workspace.rglob("config") if path.is_file()}
    assert len(configurations) == 4
    reports = cleaned(workspace, tmp_path / "before")
    assert reports == []
    assert {path: path.read_bytes() for path in configurations} == configurations
    for (folder, question), output in before.items():
        assert git(folder, *question) == output, (folder, question)


MARK = "ran"
Prepare = Callable[[Path, str], tuple[str, ...] | None]
"""Changes a repository so that git runs a program; returns the command that an evaluator would call."""


def setting(key: str, *command: str, value: str = "{program}") -> Prepare:
    def prepare(folder: Path, program: str) -> tuple[str, ...]:
        git(folder, "config", key, value.format(program=program))
        return command

    return prepare


def textconv(folder: Path, program: str) -> tuple[str, ...]:
    (folder / ".gitattributes").write_text("*.txt diff=evil\n")
    git(folder, "config", "diff.evil.textconv", program)
    return ("diff",)


def include(folder: Path, program: str) -> tuple[str, ...]:
    (folder / "more").write_text(f"[core]\n\tfsmonitor = {program}\n")
    git(folder, "config", "include.path", str(folder / "more"))
    return ("status",)


def hook(folder: Path, program: str) -> tuple[str, ...]:
    shutil.copy(program, folder / ".git/hooks/post-index-change")
    return ("add", ".")


def linked_hooks(folder: Path, program: str) -> tuple[str, ...]:
    shutil.rmtree(folder / ".git/hooks")
    (folder / "scripts").mkdir()
    shutil.copy(program, folder / "scripts/post-index-change")
    (folder / ".git/hooks").symlink_to("../scripts")
    return ("add", ".")


def linked_config(folder: Path, program: str) -> tuple[str, ...]:
    git(folder, "config", "core.fsmonitor", program)
    (folder / ".git/config").rename(folder / "notes.txt")
    (folder / ".git/config").symlink_to("../notes.txt")
    return ("status",)


def hard_linked_config(folder: Path, program: str) -> tuple[str, ...]:
    git(folder, "config", "core.fsmonitor", program)
    os.link(folder / ".git/config", folder / ".a-name-before-git")
    return ("status",)


def git_file(folder: Path, program: str) -> tuple[str, ...]:
    git(folder, "config", "core.fsmonitor", program)
    (folder / ".git").rename(folder / "data")
    (folder / ".git").write_text("gitdir: data\n")
    return ("status",)


def common_folder(folder: Path, program: str) -> tuple[str, ...]:
    git(folder, "config", "core.fsmonitor", program)
    (folder / "common").mkdir()
    for name in ("config", "objects", "refs"):
        (folder / ".git" / name).rename(folder / "common" / name)
    (folder / ".git/commondir").write_text("../common\n")
    return ("status",)


def worktree_config(folder: Path, program: str) -> tuple[str, ...]:
    git(folder, "config", "extensions.worktreeConfig", "true")
    git(folder, "config", "--worktree", "core.fsmonitor", program)
    return ("status",)


def odd_syntax(folder: Path, program: str) -> tuple[str, ...]:
    with (folder / ".git/config").open("a", newline="") as file:
        file.write(f'\r\n[Core]FsMonitor\t=\\\n "{program}" ; harmless\r\n')
    return ("status",)


def dotted_section(folder: Path, program: str) -> tuple[str, ...]:
    with (folder / ".git/config").open("a") as file:
        file.write(f"[diff.Evil]\ntextconv = {program}\n")
    (folder / ".gitattributes").write_text("*.txt diff=evil\n")
    return ("diff",)


def quoted_value(folder: Path, program: str) -> tuple[str, ...]:
    """A value that must not become lines of its own when the file is written."""
    with (folder / ".git/config").open("a") as file:
        file.write(f'[user]\n\tname = "a\\n[core]\\n\\tfsmonitor = {program}\\n"\n')
        file.write(f'[branch "a]\\\\"]\n\tremote = "\\\\\\"\\n[core]\\n\\tfsmonitor={program}"\n')
        file.write(f"[core]\n\tfsmonitor = {program}\n")
    return ("status",)


def legacy_remote(folder: Path, program: str) -> tuple[str, ...]:
    (folder / ".git/remotes").mkdir()
    (folder / ".git/remotes/old").write_text(f"URL: ext::{program}\n")
    git(folder, "config", "protocol.allow", "always")
    return ("ls-remote", "old")


ATTACKS: dict[str, Prepare] = {
    "fsmonitor": setting("core.fsmonitor", "status"),
    "hooks-path": setting("core.hooksPath", "add", ".", value="{program}.d"),
    "textconv": textconv,
    "include": include,
    "hook": hook,
    "linked-hooks": linked_hooks,
    "linked-config": linked_config,
    "hard-linked-config": hard_linked_config,
    "git-file": git_file,
    "common-folder": common_folder,
    "worktree-config": worktree_config,
    "odd-syntax": odd_syntax,
    "dotted-section": dotted_section,
    "quoted-value": quoted_value,
    "legacy-remote": legacy_remote,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_git_runs_no_program_of_the_repository(workspace: Path, tmp_path: Path, name: str) -> None:
    mark, program = tmp_path / MARK, tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\nexit 1\n")
    program.chmod(0o755)
    (tmp_path / "program.d").mkdir()
    shutil.copy(program, tmp_path / "program.d/post-index-change")
    folder = repository(workspace / "library")
    command = ATTACKS[name](folder, str(program))
    assert command is not None
    mark.unlink(missing_ok=True)
    reports = cleaned(workspace, tmp_path / "before")
    git(folder, *command)
    assert not mark.exists(), "the program ran"
    assert reports, "the change is not reported"
    # The same command, in the workspace as the agent left it.
    shutil.rmtree(workspace)
    (tmp_path / "before").rename(workspace)
    git(folder, *command)
    assert mark.exists(), "the attack does not work, so that this test shows nothing"


def test_changes_are_reported(workspace: Path, tmp_path: Path) -> None:
    folder = repository(workspace / "library")
    for key in ("core.pager", "alias.x", "core.pager"):
        git(folder, "config", "--add", key, "x")
    (folder / ".git/hooks/pre-commit").write_text("#!/bin/sh\n")
    (folder / ".git/hooks/pre-commit").chmod(0o755)
    (folder / ".git/info").mkdir(exist_ok=True)
    (folder / ".git/info/attributes").write_text("*.txt text filter=evil -diff\n")
    (folder / ".hg").mkdir()
    (folder / ".hg/hgrc").write_text("[hooks]\n")
    assert sorted(cleaned(workspace, tmp_path / "before")) == [
        "library/.git/config: removed core.pager, alias.x",
        "library/.git/hooks/pre-commit: a hook, which is not executable any more",
        "library/.git/info/attributes: removed filter=evil",
        "library/.hg/hgrc: it can make a version control system run programs or leave the workspace",
    ]
    assert (folder / ".git/info/attributes").read_text().split() == ["*.txt", "text", "-diff"]


def test_files_of_that_name_elsewhere_are_unchanged(workspace: Path, tmp_path: Path) -> None:
    files = {
        "config": "[core]\n\tpager = x\n",
        ".kube/config": "apiVersion: v1\n",
        "one/config": "[alias]\n\tx = !y\n",
        "one/objects/x": "",
        "two/refs": "",
        "hooks/run.sh": "",
        "info/attributes": "* filter=x\n",
    }
    for name, text in files.items():
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).write_text(text)
    (workspace / "hooks/run.sh").chmod(0o755)
    assert cleaned(workspace, tmp_path / "before") == []
    assert {name: (workspace / name).read_text() for name in files} == files
    assert (workspace / "hooks/run.sh").stat().st_mode & 0o111


def test_large_configurations_are_emptied(workspace: Path, tmp_path: Path) -> None:
    folder = repository(workspace / "library")
    with (folder / ".git/config").open("a") as file:
        file.write("# x\n" * MAX_FILE_BYTES + "[core]\n\tfsmonitor = x\n")
    reports = cleaned(workspace, tmp_path / "before")
    assert reports == ["library/.git/config: emptied, it is too large for a configuration"]
    assert (folder / ".git/config").read_text() == ""


@pytest.mark.parametrize(
    "text",
    [
        "[core]\n\tbare = false\n[core\n\tpager = x\n",
        '[core]\n\tbare = false\n\teol = "x\n\tpager = x\n',
        "[core]\n\tbare = false\n\teol = x\\",
    ],
)
def test_configuration_is_kept_up_to_what_is_not_valid(text: str) -> None:
    kept, removed = reduce_config(text.encode(), lambda path: True, lambda location: True)
    assert kept == b"[core]\n\tbare = false\n"
    assert removed == ["everything from the first line that is not valid"]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 260_000,
        "[a]b=" + "\\\n" * 120_000,
        '[a]b="' + " " * 260_000,
    ],
    ids=["brackets", "continued", "quoted"],
)
def test_reading_a_configuration_takes_little_time(text: str) -> None:
    started = time.process_time()
    reduce_config(text.encode(), lambda path: True, lambda location: True)
    assert time.process_time() - started < 3


def test_many_keys_of_a_long_subsection_take_little_memory() -> None:
    keys = "".join(f"a{number:x}\n" for number in range(2_000))
    kept, removed = reduce_config(
        f'[x "{"a" * 200_000}"]\n{keys}'.encode(), lambda path: True, lambda location: True
    )
    assert (kept, len(removed)) == (b"", 2_000)
    assert sum(map(len, removed)) < 1 << 20


def test_many_attributes_that_name_programs_take_little_time() -> None:
    words = " ".join(f"filter={number:x}" for number in range(20_000))
    reduced, removed = reduce_file("library/info/attributes", f"* {words}")
    assert (reduced.split(), len(removed)) == ([b"*"], 20_000)


def test_many_alternates_below_a_long_path_take_little_time_and_memory() -> None:
    # Each path of one character would get the 1,800 of its folder before it.
    reduced, removed = reduce_file(f"{'d/' * 900}objects/info/alternates", "a\n" * 100_000)
    assert (reduced, removed) == (b"", ["all paths, which would be too long as absolute ones"])
    reduced, removed = reduce_file(f"{'d/' * 900}objects/info/alternates", "a\n" * 100)
    assert (reduced.count(b"\n"), removed) == (100, [])


def reduce_file(name: str, content: str) -> tuple[bytes, list[str]]:
    """What is kept of a file of the repository `library`, and the names of the rest, within a second."""
    repositories = Repositories(["library/objects", "library/refs"], PurePosixPath("/workspace"))
    reduce = repositories.treatment(name, None).reduce
    assert reduce is not None
    started = time.process_time()
    reduction = reduce(content.encode(), name)
    assert time.process_time() - started < 1
    return reduction


def test_alternates_that_lead_out_are_removed(workspace: Path, tmp_path: Path) -> None:
    library, other = repository(workspace / "library"), repository(workspace / "other")
    alternates = library / ".git/objects/info/alternates"
    lines = (
        "../../../other/.git/objects",
        "../../../../tasks/objects",
        str(other / ".git/objects"),
        "/episode/tasks/objects",
        f"{workspace}/../tasks",
        "",
    )
    alternates.write_text("\n".join(lines))
    reports = cleaned(workspace, tmp_path / "before")
    # A relative path becomes an absolute one, as it could be reached through a link to its folder.
    assert alternates.read_text() == f"{other}/.git/objects\n{other}/.git/objects\n"
    assert reports == ["library/.git/objects/info/alternates: removed a path that leads out"]
