"""Creates the repository, and records the hashes of two of its commits for the evaluator."""

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from utils.preparation import episode

from .history import CULPRIT, Version, versions

GROUNDTRUTH = Path(__file__).resolve().parents[1] / "groundtruth_workspace"


def main() -> None:
    repository = episode().workspace / "repository"
    repository.mkdir()
    history = list(versions())
    git(repository, "init", "--quiet", "--template=", "--object-format=sha1", "--initial-branch=main")
    git(repository, "config", "user.name", "Price desk")
    git(repository, "config", "user.email", "prices@parcels.example")
    git(repository, "fast-import", "--quiet", stream=b"".join(map(fast_import_commit, history)))
    git(repository, "reset", "--quiet", "--hard", "main")
    ids = git(repository, "rev-list", "--reverse", "main").split()
    commits = {"culprit": ids[[version.message for version in history].index(CULPRIT)], "tip": ids[-1]}
    (GROUNDTRUTH / "commits.json").write_text(json.dumps(commits))


def fast_import_commit(version: Version) -> bytes:
    """Return a commit in the format of `git fast-import`; its hash depends on the version only."""
    email = version.author.split()[0].lower() + "@parcels.example"
    committed_at = datetime.fromisoformat(version.date).replace(hour=9, tzinfo=UTC)
    lines = [
        "commit refs/heads/main",
        f"committer {version.author} <{email}> {committed_at.timestamp():.0f} +0000",
        data(version.message),
    ]
    for name, text in version.files.items():
        lines += [f"M 644 inline {name}", data(text)]
    return ("\n".join(lines) + "\n").encode()


def data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}"


def git(repository: Path, *arguments: str, stream: bytes = b"") -> str:
    """Run git without the user's configuration and return its output."""
    result = subprocess.run(
        ["git", "-C", repository, *arguments],
        input=stream,
        env={"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull},
        stdout=subprocess.PIPE,
        check=True,
    )
    return result.stdout.decode()


if __name__ == "__main__":
    main()
