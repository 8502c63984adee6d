"""Unlisted failures are problems, and so are listed failures that do not happen."""

from __future__ import annotations

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


def test_a_listed_failure_is_not_a_problem() -> None:
    assert LISTED.problems("task-old", report(tools__progress=False, tools__list=True)) == []


def test_an_unlisted_failure_is_a_problem_with_its_message() -> None:
    problems = LISTED.problems("task-old", report(tools__progress=False, tools__list=False))
    assert problems == ["tools/list failed: the reason"]


def test_a_listed_failure_that_passes_is_a_problem() -> None:
    problems = LISTED.problems("task-old", report(tools__progress=True))
    assert problems == ["tools/progress is listed as an expected failure and did not fail"]


def test_a_listed_failure_whose_check_did_not_run_is_a_problem() -> None:
    assert len(LISTED.problems("task-old", report(tools__list=True))) == 1


def test_a_listed_failure_of_a_scenario_that_did_not_run_is_not_a_problem() -> None:
    assert LISTED.problems("task-old", report(ping__ping=True)) == []


def test_a_pattern_needs_only_one_failure() -> None:
    assert LISTED.problems("task-old", report(**{"tasks-a__one": False, "tasks-a__two": True})) == []


def test_the_list_of_one_run_does_not_apply_to_another() -> None:
    assert len(LISTED.problems("episode-old", report(tools__progress=False))) == 1


def test_a_check_that_ran_twice_has_the_worse_result() -> None:
    (check,) = collapse("tools", [{"id": "list", "status": status} for status in ("SUCCESS", "FAILURE")])
    assert check.failed
    assert not check.passed
