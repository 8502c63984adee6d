"""apply-change-requests: attempts that look like a solution but are wrong, and how long a right one is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from decathlon_client.values import CLAIM

from decathlon_mcp.starter import oracle
from tests.starter.bench import Bench

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TASK = "apply-change-requests"


def git(bench: Bench, *words: str) -> str:
    repository = bench.workspace / "repository"
    return subprocess.run(
        ["git", "-C", repository, *words], check=True, capture_output=True, text=True
    ).stdout


def test_a_right_attempt_takes_more_than_25_calls_of_three_servers() -> None:
    servers = [step.tool.split("__")[0] for step in oracle(TASK) if step.tool != CLAIM]
    assert len(servers) >= 25
    assert set(servers) == {"database", "files", "git"}
    # Whatever else is done in fewer calls, each request has a commit or a move of its own.
    commits = [step for step in oracle(TASK) if step.tool in ("git__git_add", "git__git_commit")]
    moves = [step for step in oracle(TASK) if step.tool == "files__move_file"]
    assert len(commits) + len(commits) // 2 + len(moves) >= 25


def squash(bench: Bench) -> None:
    git(bench, "reset", "--quiet", "--soft", "main~2")
    git(bench, "commit", "--quiet", "-m", "R-39: C-305 price_cents")


def add_one(bench: Bench) -> None:
    bench.edit("repository/parts.json", '"price_cents": 335', '"price_cents": 336')
    git(bench, "commit", "--quiet", "--all", "-m", "R-36: E-402 price_cents")


def reword(bench: Bench) -> None:
    git(bench, "commit", "--quiet", "--amend", "-m", "Apply R-39")


def change_more(bench: Bench) -> None:
    bench.edit("repository/README.md", "the supplier", "its supplier")
    git(bench, "commit", "--quiet", "--amend", "--all", "--no-edit")


def take_a_wrong_value(bench: Bench) -> None:
    bench.edit("repository/parts.json", '"price_cents": 979', '"price_cents": 980')
    git(bench, "commit", "--quiet", "--amend", "--all", "--no-edit")


def start_over(bench: Bench) -> None:
    git(bench, "reset", "--quiet", "--hard", "main~6")


def undo_two(bench: Bench) -> None:
    git(bench, "reset", "--quiet", "--hard", "main~2")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (squash, "stands where 'R-38: F-077 price_cents' belongs"),
        (add_one, "stands where 'R-39: C-305 price_cents' belongs"),
        (reword, "'Apply R-39' stands where"),
        (change_more, "changes README.md, parts.json"),
        (take_a_wrong_value, "not the list with this one change"),
        (start_over, "nothing was committed"),
        (undo_two, "stands where 'R-39: C-305 price_cents' belongs"),
    ],
)
async def test_other_commits_fail(right: Bench, change: Callable[[Bench], None], reason: str) -> None:
    change(right)
    right.assert_fails(reason)


async def test_the_order_of_the_numbers_fails(right: Bench) -> None:
    _, second, *rest = git(right, "rev-list", "--reverse", "main~6..main").split()
    git(right, "reset", "--quiet", "--hard", "main~6")
    right.edit("repository/parts.json", '"price_cents": 1250', '"price_cents": 1320')
    git(right, "commit", "--quiet", "--all", "-m", "R-31: A-100 price_cents")
    git(right, "checkout", second, "--", "parts.json")
    git(right, "commit", "--quiet", "-m", "R-32: B-210 reorder_at")
    for commit in rest:
        git(right, "checkout", commit, "--", "parts.json")
        git(right, "commit", "--quiet", "--reuse-message", commit)
    right.assert_fails("'R-32: B-210 reorder_at' stands where 'R-31: A-100 price_cents' belongs")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("rejected/R-33.md", "applied/R-33.md", "rejected/R-33.md is missing"),
        ("applied/R-40.md", "requests/R-40.md", "applied/R-40.md is missing"),
    ],
)
async def test_a_request_in_the_wrong_folder_fails(right: Bench, old: str, new: str, reason: str) -> None:
    right.move(old, new)
    right.assert_fails(reason)


async def test_a_changed_request_fails(right: Bench) -> None:
    right.edit("rejected/R-35.md", "1250", "1320")
    right.assert_fails("rejected/R-35.md was changed")


@pytest.mark.parametrize(
    ("statement", "table"),
    [
        ("DELETE FROM outcomes WHERE request = 'R-36'", "outcomes"),
        ("UPDATE outcomes SET outcome = 'applied' WHERE request = 'R-37'", "outcomes"),
        ("UPDATE staff SET left_on = NULL", "staff"),
        ("UPDATE rights SET max_percent = 20 WHERE max_percent = 10", "rights"),
    ],
)
async def test_another_table_fails(right: Bench, statement: str, table: str) -> None:
    right.sql("desk.db", statement)
    right.assert_fails(f"table {table} does not hold")
