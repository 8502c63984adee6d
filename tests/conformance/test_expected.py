"""Unlisted failures are problems, and so are listed failures that do not happen."""

from __future__ import annotations

import pytest

from tests.conformance.expected import Expected, Group
from tests.conformance.suites import Check, Report, collapse

LISTED = Expected(
    (
        Group(
            reason="because it is not passed through",
            runs=("task-*",),
            checks=("tools/progress", "tasks-*/*"),
        ),
    )
)


def report(**outcomes: bool) -> Report:
    """A report of checks by name, `scenario__check`; true for those that passed."""
    checks = (
        Check(*name.split("__"), failed=not ok, passed=ok, message="the reason")
        for name, ok in outcomes.items()
    )
    return Report(tuple(checks), "")


STALE = "is listed as an expected failure and did not fail"
CASES: list[tuple[str, dict[str, bool], list[str]]] = [
    ("task-old", {"tools__progress": False, "tools__list": True}, []),
    ("task-old", {"tools__progress": False, "tools__list": False}, ["tools/list failed: the reason"]),
    ("task-old", {"tools__progress": True}, [f"tools/progress {STALE}"]),
    # The check did not run, but others of its scenario.
    ("task-old", {"tools__list": True}, [f"tools/progress {STALE}"]),
    ("task-old", {"ping__ping": True}, []),
    # A pattern needs one failure only, and a list is of its own runs.
    ("task-old", {"tasks-a__one": False, "tasks-a__two": True}, []),
    ("episode-old", {"tools__progress": False}, ["tools/progress failed: the reason"]),
]


@pytest.mark.parametrize(("run", "outcomes", "problems"), CASES)
def test_unlisted_failures_and_listed_ones_that_do_not_happen_are_problems(
    run: str, outcomes: dict[str, bool], problems: list[str]
) -> None:
    assert LISTED.problems(run, report(**outcomes)) == problems


def test_a_check_that_ran_twice_has_the_worse_result() -> None:
    (check,) = collapse("tools", [{"id": "list", "status": status} for status in ("SUCCESS", "FAILURE")])
    assert check.failed
    assert not check.passed
