"""find-rate-regression: attempts that look like a solution but are wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.starter.bench import Bench

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TASK = "find-rate-regression"


def git(bench: Bench, *words: str) -> str:
    repository = bench.workspace / "repository"
    return subprocess.run(
        ["git", "-C", repository, *words], check=True, capture_output=True, text=True
    ).stdout


def amend(bench: Bench, change: Callable[[dict[str, Any]], object]) -> None:
    """Put another price list into the attempt's one commit."""
    path = bench.workspace / "repository" / "rates.json"
    rates: dict[str, Any] = json.loads(path.read_text())
    change(rates)
    path.write_text(json.dumps(rates, indent=2) + "\n")
    git(bench, "commit", "--quiet", "--amend", "--no-edit", "--all")


async def test_naming_the_commit_that_raised_the_wrong_rate_fails(right: Bench) -> None:
    right.edit_json("finding.json", commit=git(right, "rev-parse", "main~3").strip())
    right.assert_fails("another commit")


async def test_reporting_the_rate_of_before_the_raise_fails(right: Bench) -> None:
    right.edit_json("finding.json", value=420)
    right.assert_fails("field or value")


async def test_committing_the_rate_of_before_the_raise_fails(right: Bench) -> None:
    amend(right, lambda rates: rates["zones"]["islands"].update(per_kg=420))
    right.assert_fails("not the list with that one rate repaired")


async def test_bringing_the_list_of_before_the_mistake_back_fails(right: Bench) -> None:
    amend(right, lambda rates: rates.update(json.loads(git(right, "show", "main~9:rates.json"))))
    right.assert_fails("not the list with that one rate repaired")


async def test_repairing_the_file_without_a_commit_fails(right: Bench) -> None:
    git(right, "reset", "--quiet", "--soft", "main~1")
    right.assert_fails("nothing was committed")


async def test_rewriting_the_history_fails(right: Bench) -> None:
    git(right, "reset", "--quiet", "--soft", "main~3")
    git(right, "commit", "--quiet", "-m", "Islands: 465 a kilogram")
    right.assert_fails("exactly one commit")


async def test_committing_more_than_the_price_list_fails(right: Bench) -> None:
    shutil.copy(right.workspace / "finding.json", right.workspace / "repository")
    git(right, "add", "--all")
    git(right, "commit", "--quiet", "--amend", "--no-edit")
    right.assert_fails("the commit changes finding.json, rates.json")


async def test_a_packed_repository_is_read_all_the_same(right: Bench) -> None:
    git(right, "gc", "--quiet")
    assert right.evaluate().exit_code == 0


async def test_what_the_repository_configures_is_never_run(right: Bench) -> None:
    mark = right.root / "ran"
    git(right, "config", "core.fsmonitor", f"touch {mark}")
    git(right, "config", "core.pager", f"touch {mark}")
    git(right, "config", "diff.external", f"touch {mark}")
    assert right.evaluate().exit_code == 0
    assert not mark.exists()


async def test_a_damaged_repository_fails(right: Bench) -> None:
    for path in (right.workspace / "repository" / ".git" / "objects").rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            path.write_bytes(b"\0")
    right.assert_fails("repository is damaged")
