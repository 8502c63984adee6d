"""The list of expected failures is held both ways."""

from __future__ import annotations

from tests.conformance.expected import Expected, Group
from tests.conformance.suites import Check, Report, collapse

LISTED = Expected(
    (
        Group(
            reason="because it does not pass through",
            runs=("task-*",),
            checks=("tools/progress", "tasks-*/*"),
        ),
    )
)


def report(**outcomes: bool) -> Report:
    """Checks by name, `scenario__check`; true: it passed."""
    made = (
        Check(*name.split("__"), failed=not ok, passed=ok, message="said why")
        for name, ok in outcomes.items()
    )
    return Report(tuple(made), "")


def test_a_listed_failure_is_no_complaint() -> None:
    assert LISTED.complaints("task-old", report(tools__progress=False, tools__list=True)) == []


def test_a_failure_that_is_not_listed_is_a_complaint_with_its_reason() -> None:
    complaints = LISTED.complaints("task-old", report(tools__progress=False, tools__list=False))
    assert complaints == ["tools/list failed: said why"]


def test_a_listed_failure_that_passes_is_a_complaint() -> None:
    complaints = LISTED.complaints("task-old", report(tools__progress=True))
    assert complaints == ["tools/progress is listed as an expected failure and did not fail"]


def test_a_listed_failure_whose_check_was_not_made_is_a_complaint() -> None:
    assert len(LISTED.complaints("task-old", report(tools__list=True))) == 1


def test_a_listed_failure_of_a_scenario_that_was_not_run_is_no_complaint() -> None:
    assert LISTED.complaints("task-old", report(ping__ping=True)) == []


def test_a_pattern_needs_one_failure_only() -> None:
    assert LISTED.complaints("task-old", report(**{"tasks-a__one": False, "tasks-a__two": True})) == []


def test_the_list_of_one_run_does_not_excuse_another() -> None:
    assert len(LISTED.complaints("episode-old", report(tools__progress=False))) == 1


def test_a_check_made_twice_has_the_worse_of_its_results() -> None:
    (check,) = collapse("tools", [{"id": "list", "status": status} for status in ("SUCCESS", "FAILURE")])
    assert check.failed
    assert not check.passed
