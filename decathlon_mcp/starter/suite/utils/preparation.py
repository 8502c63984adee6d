"""Parses the command line of a preprocess, and creates Git repositories for it."""

import argparse
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from utils.evaluation import launch_time


@dataclass(frozen=True)
class Episode:
    """A preprocess's input. Its output must depend on the launch time only."""

    workspace: Path
    launch_time: datetime


def episode() -> Episode:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent_workspace", required=True, type=Path)
    parser.add_argument("--launch_time", required=True, type=launch_time)
    arguments = parser.parse_args()
    return Episode(arguments.agent_workspace, arguments.launch_time)


@dataclass(frozen=True)
class Version:
    """A commit, with the content of the files after it. `date` is a day, as in 2026-01-31."""

    date: str
    author: str
    message: str
    files: dict[str, str]


def create_repository(folder: Path, versions: Iterable[Version], *, user: str, email: str) -> list[str]:
    """Create a repository with one commit for each version on `main`; returns their hashes, oldest first.

    The hashes depend on the versions and the domain of `email` only. `user` and `email` are who commits there
    later.
    """
    folder.mkdir()
    _git(folder, "init", "--quiet", "--template=", "--object-format=sha1", "--initial-branch=main")
    _git(folder, "config", "user.name", user)
    _git(folder, "config", "user.email", email)
    domain = email.partition("@")[2]
    stream = b"".join(_fast_import_commit(version, domain) for version in versions)
    _git(folder, "fast-import", "--quiet", stream=stream)
    _git(folder, "reset", "--quiet", "--hard", "main")
    return _git(folder, "rev-list", "--reverse", "main").split()


def _fast_import_commit(version: Version, domain: str) -> bytes:
    """A commit in the format of `git fast-import`."""
    email = f"{version.author.split()[0].lower()}@{domain}"
    committed_at = datetime.fromisoformat(version.date).replace(hour=9, tzinfo=UTC)
    lines = [
        "commit refs/heads/main",
        f"committer {version.author} <{email}> {committed_at.timestamp():.0f} +0000",
        _data(version.message),
    ]
    for name, text in version.files.items():
        lines += [f"M 644 inline {name}", _data(text)]
    return ("\n".join(lines) + "\n").encode()


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}"


def _git(repository: Path, *arguments: str, stream: bytes = b"") -> str:
    """Run git without the user's configuration and return its output."""
    result = subprocess.run(
        ["git", "-C", repository, *arguments],
        input=stream,
        env={"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull},
        stdout=subprocess.PIPE,
        check=True,
    )
    return result.stdout.decode()
