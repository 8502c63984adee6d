"""Reads a Git repository of the agent without running anything in it.

Git follows the configuration and hooks of the repository that it runs in, so it never runs in the agent's.
The objects, which are data, are copied into a new repository and read there.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from utils.evaluation import Wrong, require
from utils.submission import MAX_BYTES, MAX_FILES, regular_file

MAX_SECONDS = 30


@dataclass(frozen=True)
class Commit:
    """A commit: full hash, parents' hashes, the message's first line, and the paths that differ from the
    first parent."""

    id: str
    parents: tuple[str, ...]
    subject: str
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Repository:
    """A bare copy of the objects of `folder`, a repository of the workspace."""

    workspace: Path
    folder: str
    copy: Path

    def branch(self, name: str) -> Commit:
        """Return the commit that a branch points to."""
        ref = f"refs/heads/{name}"
        try:
            commit_id = (
                regular_file(self.workspace, f"{self.folder}/.git/{ref}")
                .read_text("ascii", "replace")
                .strip()
            )
        except Wrong:
            packed = regular_file(self.workspace, f"{self.folder}/.git/packed-refs").read_text(
                "ascii", "replace"
            )
            lines = [line.split() for line in packed.splitlines()]
            commit_id = next((line[0] for line in lines if line[1:] == [ref]), "")
        require(re.fullmatch(r"[0-9a-f]{40}", commit_id) is not None, f"{self.folder} has no branch {name}")
        return self.commit(commit_id)

    def commit(self, commit_id: str) -> Commit:
        """Return the commit with this full hash."""
        header, _, message = self._git("cat-file", "commit", commit_id).partition("\n\n")
        lines = header.splitlines()
        parents = tuple(line.removeprefix("parent ") for line in lines if line.startswith("parent "))
        subject = message.partition("\n")[0].strip()
        changed = self._git(
            "diff-tree", "-r", "-z", "--root", "--no-commit-id", "--no-renames", "--name-only", commit_id
        )
        return Commit(commit_id, parents, subject, tuple(filter(None, changed.split("\0"))))

    def text(self, commit_id: str, path: str) -> str:
        """Return the content of a file in a commit."""
        size = int(self._git("cat-file", "-s", f"{commit_id}:{path}"))
        require(size <= MAX_BYTES, f"{path} is larger than {MAX_BYTES} bytes")
        return self._git("cat-file", "blob", f"{commit_id}:{path}")

    def _git(self, *arguments: str) -> str:
        result = _run("--git-dir", str(self.copy), *arguments)
        reason = " ".join(result.stderr.decode("utf-8", "replace").split())
        require(result.returncode == 0, f"{self.folder} is damaged or incomplete: {reason}")
        return result.stdout.decode("utf-8", "replace")


@contextmanager
def open_repository(workspace: Path, folder: str) -> Iterator[Repository]:
    """Yield a copy of the repository at `folder`; the copy is deleted at the end."""
    regular_file(workspace, f"{folder}/.git/HEAD")
    objects = workspace / folder / ".git" / "objects"
    require(objects.is_dir() and not objects.is_symlink(), f"{folder} has no objects")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        _run("init", "--quiet", "--bare", "--template=", "--object-format=sha1", scratch).check_returncode()
        _copy_objects(objects, copy / "objects")
        yield Repository(workspace, folder, copy)


def _copy_objects(source: Path, target: Path) -> None:
    files = [path for path in source.rglob("*") if path.is_file() and not path.is_symlink()]
    require(len(files) <= MAX_FILES, "the repository has too many objects")
    for path in files:
        name = path.relative_to(source)
        if name.parts[0] == "pack" or re.fullmatch(r"[0-9a-f]{2}", name.parts[0]):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name)


def _run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    settings = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(
        ["git", *arguments],
        env={"PATH": os.environ["PATH"], **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=MAX_SECONDS,
    )
