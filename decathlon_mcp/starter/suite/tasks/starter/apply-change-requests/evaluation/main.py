"""Checks the commits one by one, where each request's file lies, and the table of outcomes."""

import json
from pathlib import Path
from typing import Any

from utils.evaluation import Attempt, judge, require
from utils.repository import Repository, open_repository
from utils.submission import open_database, read_text, tree

MAX_ROWS = 100


def check(attempt: Attempt) -> None:
    expected = json.loads((attempt.groundtruth / "expected.json").read_text())
    with open_repository(attempt.workspace, "repository") as repository:
        check_commits(repository, expected["base"], expected["commits"])
    check_files(attempt.workspace, expected["files"])
    with open_database(attempt.workspace, "desk.db") as database:
        for table, rows in expected["tables"].items():
            found = database.execute(f"SELECT * FROM {table}").fetchmany(MAX_ROWS)
            same = sorted(map(repr, found)) == sorted(repr(tuple(row)) for row in rows)
            require(same, f"table {table} does not hold what it should")


def check_commits(repository: Repository, base: str, expected: list[dict[str, Any]]) -> None:
    """Check the commits of main from its tip back to `base`."""
    commit = repository.branch("main")
    require(commit.id != base, "nothing was committed to main")
    for wanted in reversed(expected):
        subject = wanted["subject"]
        require(commit.id != base, f"main has fewer than {len(expected)} commits on top of where it was")
        require(commit.subject == subject, f"commit {commit.subject[:60]!r} stands where {subject!r} belongs")
        require(len(commit.parents) == 1, f"{subject}: a merge, or without a parent")
        require(commit.changed == ("parts.json",), f"{subject}: changes {', '.join(commit.changed)[:200]}")
        try:
            parts = json.loads(repository.text(commit.id, "parts.json"))
        except (ValueError, RecursionError):
            parts = None
        require(parts == wanted["parts"], f"{subject}: parts.json is not the list with this one change")
        commit = repository.commit(commit.parents[0])
    require(commit.id == base, f"main has more than {len(expected)} commits on top of where it was")


def check_files(workspace: Path, expected: dict[str, str]) -> None:
    """Check that the requests lie where they belong, unchanged."""
    folders = [workspace / name for name in ("requests", "applied", "rejected")]
    found = [
        f"{folder.name}/{name}"
        for folder in folders
        if folder.is_dir() and not folder.is_symlink()
        for name in tree(folder)
    ]
    for name, text in expected.items():
        require(name in found, f"{name} is missing")
        require(read_text(workspace, name) == text, f"{name} was changed")
    for name in found:
        require(name in expected, f"{name} should not be there")


if __name__ == "__main__":
    judge(check)
