"""Property of the filter of repositories: whatever their files contain, git reads nothing outside of them.

    python -m tests.fuzz.repository_files --minutes 30

A long run draws its examples with hypothesis, not guided by coverage, since git itself is the oracle: most of
the time of an example is git's. Needs git.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decathlon_mcp.archives.packing import pack_folder
from decathlon_mcp.archives.workspace import CleanWorkspace
from decathlon_mcp.archives.writing import archive_chunks
from tests.archives.cleaning import extract
from tests.fuzz import run_for_minutes

SECRET = "canary"
"""In a commit, and in the name of a file, of the repository outside."""
PATHS = (".git", "objects", "refs", "info", "a", "b", "..", ".", "", "truth", "library", "workspace", "store")
IN_GIT = (
    *("commondir", "config", "config.worktree", "gitdir", "objects/info", "objects/info/alternates"),
    *("remotes/old", "worktrees/t/commondir", "worktrees/t/gitdir"),
)
FILES = (
    *(
        "library/.git",
        *(f"library/.git/{name}" for name in IN_GIT),
        "library/.gitmodules",
        "library/a/b/.git",
    ),
    *("library/a/b/info/alternates", "library/a/b/notes", "store/info", "tree/.git"),
)
QUOTED = '"{}"\n'
KEYS = ("remote.origin.url", "branch.main.remote", "core.worktree", "remote.pushDefault", "include.path")
COMMANDS = (
    *("log --all --patch -3", "fetch", "fetch old", "log -1 --patch FETCH_HEAD", "ls-files --others", "show"),
)


def paths(suffix: str) -> st.SearchStrategy[str]:
    """Paths to a repository's folder, plus `suffix`; `{top}` is the folder above the workspace."""
    noise = st.lists(st.sampled_from(PATHS), min_size=1, max_size=6).map("/".join)
    outside = st.integers(1, 6).map(lambda count: "../" * count + "truth/.git" + suffix)
    absolute = st.sampled_from(("{top}/truth/.git" + suffix, "{top}/workspace/library/a/b/notes"))
    return outside | absolute | noise | noise.map(lambda path: f"{{top}}/{path}")


def contents(name: str) -> st.SearchStrategy[str]:
    """Contents of the kind that git expects in a file of this name, and others."""
    match PurePosixPath(name).name:
        case ".git" | "notes":
            expected = paths("").map(lambda path: f"gitdir: {path}\n")
        case "config" | "config.worktree" | ".gitmodules":
            locations = paths("") | paths("").map(lambda path: f"file://{path}")
            expected = st.lists(
                st.builds(_setting, st.sampled_from(KEYS), locations), min_size=1, max_size=3
            ).map("".join)
        case "old":
            expected = paths("").map(lambda path: f"URL: {path}\n")
        case "alternates":
            plain = paths("/objects").map(lambda path: f"{path}\n")
            expected = plain | plain.map(lambda line: QUOTED.format(line.strip().replace("/", r"\057")))
        case _:
            expected = paths("").map(lambda path: f"{path}\n")
    return expected | paths("").map(lambda path: f"-> {path}")


def examples() -> st.SearchStrategy[Mapping[str, str]]:
    """Contents by path in the workspace; `-> PATH` is a symbolic link."""
    names = st.lists(st.sampled_from(FILES), min_size=1, max_size=4, unique=True)
    return names.flatmap(lambda drawn: st.fixed_dictionaries({name: contents(name) for name in drawn}))


def _setting(key: str, value: str) -> str:
    section, *subsection, name = key.split(".")
    quoted = "".join(f' "{part}"' for part in subsection)
    return f"[{section}{quoted}]\n\t{name} = {value}\n"


class Machine:
    """A folder with a repository outside of the workspace, and a workspace for each example."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.examples = 0
        for folder, text in ((top / "truth", SECRET), (top / "honest", "honest")):
            folder.mkdir()
            self._git(folder, "init", "-q", "-b", "main")
            (folder / text).write_text(text)
            self._git(folder, "add", ".")
            self._git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", text)
        (top / "truth" / f"{SECRET}.new").write_text("")
        self._head = self._git(top / "truth", "rev-parse", "HEAD").strip()

    def check(self, files: Mapping[str, str]) -> None:
        """Raise AssertionError if git shows anything of the repository outside."""
        self.examples += 1
        workspace, archive = self.top / "workspace", self.top / "workspace.tar"
        shutil.rmtree(workspace, ignore_errors=True)
        shutil.copytree(self.top / "honest", workspace / "library")
        for name, text in files.items():
            _write(workspace / name, text.replace("{top}", str(self.top)))
        pack_folder(workspace, archive, 1 << 30, below=self.top)
        shutil.rmtree(workspace)
        limits: Any = {"limit_bytes": 1 << 30, "limit_members": 10_000}
        clean = CleanWorkspace(archive, prefix="workspace", root=PurePosixPath(self.top), **limits)
        data = b"".join(archive_chunks(clean.entries()))
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            extract(tar, self.top)
        for folder in ("library", "tree", "library/a/b"):
            if os.path.lexists(workspace / folder / ".git"):
                commands = (*COMMANDS, f"show {self._head}")
                output = "".join(self._git(workspace / folder, *command.split()) for command in commands)
                assert SECRET not in output, (files, output)

    def _git(self, folder: Path, *arguments: str) -> str:
        environment = {
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            # Otherwise git would find a repository in which these tests are run.
            "GIT_CEILING_DIRECTORIES": str(self.top),
            "HOME": str(self.top),
            "PATH": os.environ["PATH"],
        }
        done = subprocess.run(
            ("git", "-C", folder, *arguments), env=environment, timeout=60, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return done.stdout.decode("utf-8", "backslashreplace")


def _write(path: Path, text: str) -> None:
    for folder in reversed(path.parents):
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        folder.mkdir(exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if text.startswith("-> "):
        path.symlink_to(text[3:] or ".")
    else:
        path.write_text(text)


def run(count: int) -> int:
    """Check this many generated examples at most; returns how many it were. Raises AssertionError."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        machine = Machine(Path(name).resolve())

        @settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(files=examples())
        def check(files: Mapping[str, str]) -> None:
            machine.check(files)

        check()
        return machine.examples


if __name__ == "__main__":
    run_for_minutes(run)
