"""Rubrics: loading them, and computing rewards from metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.grading.rubric import BadMetricsError, Rubric, load_rubric, read_metrics
from tests.grading.support import PAPER, rubric_text, write_suite

EVALUATOR = {f"{PAPER}/evaluation/evaluator.py": "def evaluate(workspace):\n    return dict(NAMES)\n"}
NO_FUNCTION = {f"{PAPER}/evaluation/evaluator.py": "def score(workspace):\n    return {}\n"}


def load(tmp_path: Path, files: dict[str, str]) -> Rubric | None:
    suite = write_suite(tmp_path / "checkout", {**EVALUATOR, **files})
    return load_rubric(suite, suite.tasks["paper"])


def own(**fields: Any) -> dict[str, str]:
    return {f"{PAPER}/evaluation/rubric.yaml": rubric_text(**fields)}


def test_weight_for_a_missing_metric_is_an_error_that_lists_the_metrics() -> None:
    with pytest.raises(
        BadMetricsError, match=r"has a weight for 'paper', which is no metric here \(metrics: a, b\)"
    ):
        Rubric({"paper": 1}).reward({"b": 1, "a": 2})


def test_metric_outside_its_range_is_an_error() -> None:
    ranged = Rubric({"a": 1}, ranges={"a": (0, 1)})
    assert ranged.reward({"a": 1}) == 1
    with pytest.raises(BadMetricsError, match=r"metric 'a' is 1\.01, outside its range 0 to 1"):
        ranged.reward({"a": 1.01})


@pytest.mark.parametrize(
    ("term", "value"),
    [
        ("calls < 20", 1.0),
        ("calls<2", 0.0),
        ("calls >= 20", 0.0),
        ("calls != 19", 0.0),
    ],
)
def test_comparisons_are_one_or_zero(term: str, value: float) -> None:
    compared = Rubric({term: 2})
    assert compared.reward({"calls": 19}) == 2 * value
    assert compared.comparisons({"calls": 19}) == {term: value}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "without returning metrics"),
        ("[1]", "did not return a dict"),
        ('{"a": 1}{"a": 2}', "not one JSON value"),
        ('{"a": NaN}', "metric 'a' is nan, not a finite number"),
        ('{"a": 1%s}' % ("0" * 400), "beyond ±9007199254740991"),
        ('{"a": "1"}', "metric 'a' is \"1\", not a finite number or a boolean"),
        ('{"calls": 1}', "a metric that the server itself provides"),
        ('{"a < 1": 1}', "none of the characters < > = !"),
        ('{"%s": 1}' % ("b" * 101), "1 to 100 printable characters"),
        ('{"a": 1e300}', "metric 'a' is 1e+300, beyond"),
        ("[" * 100_000, "not one JSON value"),
        (json.dumps({str(n): n for n in range(300)}), "200 at most"),
    ],
)
def test_invalid_function_output_is_an_error(text: str | None, complaint: str) -> None:
    with pytest.raises(BadMetricsError) as error:
        read_metrics(text)
    assert complaint in error.value.message


def test_suite_rubrics_apply_by_task_id_then_by_default(tmp_path: Path) -> None:
    default = {"weights": {"success": 1}}
    suite = {**NO_FUNCTION, "rubrics.yaml": rubric_text(default=default)}
    assert load(tmp_path, suite) == Rubric({"success": 1})
    named = {"default": default, "tasks": {"paper": {"weights": {"calls": -1}}}}
    suite["rubrics.yaml"] = rubric_text(**named)
    assert load(tmp_path, suite) == Rubric({"calls": -1})
    assert load(tmp_path, {**suite, **own(weights={"seconds": 1})}) == Rubric({"seconds": 1})


def test_two_rubrics_for_one_task_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="two rubrics"):
        load(
            tmp_path, {**own(weights={"calls": 1}), f"{PAPER}/rubric.yaml": rubric_text(weights={"calls": 1})}
        )


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "weights"),
        ({"weights": {"a": 1}}, "without `function`, or a function `evaluate`, there is no metric 'a'"),
        ({"weights": {"calls": 1}, "ranges": {"a": [0, 1]}}, "there is no metric 'a'"),
        ({"weights": {"calls": True}}, "weights.calls"),
        ({"weights": {"calls <": 1}}, "a comparison is"),
        ({"weights": {"calls < __import__('os')": 1}}, "a comparison is"),
        ({"weights": {"calls": 1}, "ranges": {"calls": [1, 0]}}, "the lower one first"),
        ({"weights": {"calls": -1}, "normalise": True}, "must be above 0"),
        ({"weights": {"calls": 1}, "normalize": True}, "there is no such field; did you mean normalise?"),
        ({"weigths": {"calls": 1}}, "line 1: weigths: there is no such field; did you mean weights?"),
        ({"weights": {"a": 1}, "function": "evaluation/../x.py:evaluate"}, "expected a file"),
        ({"weights": {"a": 1}, "function": "evaluation/evaluator.py:score"}, "it has no function 'score'"),
        (
            {"weights": {"a": 1}, "function": "evaluation/evaluator.py:evalute"},
            "it has no function 'evalute'; did you mean evaluate?",
        ),
    ],
)
def test_invalid_rubric_is_an_error_with_file_and_field(
    tmp_path: Path, fields: dict[str, Any], complaint: str
) -> None:
    files = EVALUATOR if "function" in fields else NO_FUNCTION
    with pytest.raises(SuiteError) as error:
        load(tmp_path, {**files, **own(**fields)})
    assert "rubric.yaml" in error.value.message
    assert complaint in error.value.message


@pytest.mark.parametrize(
    "source",
    [
        "async def evaluate(): ...",
        "from .x import score as evaluate",
        "evaluate = max",
    ],
)
def test_function_may_be_defined_assigned_or_imported(tmp_path: Path, source: str) -> None:
    files = {f"{PAPER}/evaluation/evaluator.py": source}
    assert load(tmp_path, {**files, **own(function="evaluation/evaluator.py:evaluate", weights={"a": 1})})


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (
            "return {'correct': 1}",
            "weights.corect: evaluation/evaluator.py:evaluate returns no metric 'corect'",
        ),
        (
            "def inner():\n        return {'corect': 1}\n    return {}",
            "(it returns none; the server adds calls,",
        ),
    ],
)
def test_weight_for_a_metric_that_the_function_never_returns_is_an_error(
    tmp_path: Path, body: str, complaint: str
) -> None:
    files = {f"{PAPER}/evaluation/evaluator.py": f"def evaluate(workspace):\n    {body}\n"}
    with pytest.raises(SuiteError) as error:
        load(tmp_path, {**files, **own(function="evaluation/evaluator.py:evaluate", weights={"corect": 1})})
    assert complaint in error.value.message


@pytest.mark.parametrize(
    "body",
    [
        "if workspace:\n        return {'corect': 1}\n    return {}",
        "return {'other': 1, **workspace}",
        "result = {'other': 1}\n    return result",
        "raise ValueError",
    ],
)
def test_metrics_that_a_function_may_return_can_have_a_weight(tmp_path: Path, body: str) -> None:
    files = {f"{PAPER}/evaluation/evaluator.py": f"def evaluate(workspace):\n    {body}\n"}
    rubric = own(function="evaluation/evaluator.py:evaluate", weights={"corect": 1, "calls < 3": 1})
    assert load(tmp_path, {**files, **rubric})


def test_rubric_for_an_unknown_task_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="there is no task 'papr' in this suite; did you mean paper"):
        load(tmp_path, {"rubrics.yaml": rubric_text(tasks={"papr": {"weights": {"calls": 1}}})})
