"""The summary of a batch: mean, spread and pass@k of each task."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from decathlon_client import NoVerdictError, Result, Summary, Verdict


def result(task: str, reward: float | None) -> Result[None]:
    verdict = None
    if reward is not None:
        raw = {"reward": reward, "success": reward == 1.0, "status": "scored"}
        verdict = Verdict.read(raw)
    failure = None if verdict else NoVerdictError("lost", status="sandbox_lost", verdict={})
    return Result(
        index=0,
        task=task,
        group=0,
        attempt=0,
        episode="e",
        played=None,
        verdict=verdict,
        failure=failure,
        fault="infrastructure" if failure else None,
        seconds=1.0,
    )


@pytest.mark.parametrize(("successes", "failure"), [(0, 0.0), (2, 0.0), (2, None), (5, None)])
def test_pass_at_k_is_the_share_of_choices_with_a_success_and_pass_all_of_those_without_a_failure(
    successes: int, failure: float | None
) -> None:
    rewards = [1.0] * successes + [failure] * (5 - successes)
    (task,) = Summary.of(result("a", reward) for reward in rewards).tasks
    for k in range(1, 6):
        choices = list(itertools.combinations(rewards, k))
        assert task.pass_at(k) == pytest.approx(sum(1.0 in choice for choice in choices) / len(choices))
        assert task.pass_all(k) == pytest.approx(sum({*choice} == {1.0} for choice in choices) / len(choices))
    assert (task.pass_at(6), task.pass_all(6)) == (None, None)
    with pytest.raises(ValueError, match="k must be from 1 to 5, not 0"):
        task.pass_at(0)


def test_each_task_counts_the_same_in_the_sum() -> None:
    rewards = {"a": [1.0] * 6 + [0.0] * 2, "b": [0.0, None, 0.0], "c": [None]}
    summary = Summary.of(result(task, reward) for task, given in rewards.items() for reward in given)
    assert [(task.scored, task.lost, task.successes) for task in summary.tasks] == [
        (8, 0, 6),
        (2, 1, 0),
        (0, 1, 0),
    ]
    assert summary.tasks[0].mean == 0.75
    assert summary.tasks[0].spread == pytest.approx(statistics.stdev([1.0] * 6 + [0.0] * 2))
    assert summary.mean == 0.375
    assert summary.spread == pytest.approx(statistics.stdev([0.75, 0.0]))
    assert summary.pass_at(1) == summary.pass_all(1) == 0.25
    assert summary.pass_at(8) == 1.0  # only "a" has eight episodes
    assert summary.pass_all(8) == 0.0
    assert summary.pass_at(9) is summary.pass_all(9) is None


def test_the_table_has_a_line_for_each_task_and_the_sum() -> None:
    rewards = {"tune-reactor": [1.0, 0.0, 1.0], "audit": [0.5], "lost": [None]}
    summary = Summary.of(result(task, reward) for task, given in rewards.items() for reward in given)
    assert str(summary).splitlines() == [
        "task          episodes  lost   mean  spread  pass@1  pass@2",
        "audit                1     0  0.500       -   0.000       -",
        "lost                 1     1      -       -   0.000       -",
        "tune-reactor         3     0  0.667   0.577   0.667   1.000",
        "3 tasks              5     1  0.583   0.118   0.222   1.000",
    ]


def test_a_batch_without_a_result_has_an_empty_summary() -> None:
    summary = Summary.of([])
    assert (summary.mean, summary.spread, summary.pass_at(1)) == (None, None, None)
    assert str(summary).splitlines() == [
        "task     episodes  lost  mean  spread",
        "0 tasks         0     0     -       -",
    ]


@pytest.mark.parametrize("reward", [math.inf, math.nan])
def test_a_reward_that_is_no_number_ends_no_summary(reward: float) -> None:
    summary = Summary.of(result(task, given) for task in "ab" for given in (reward, 1.0))
    assert summary.spread is not None
    assert math.isnan(summary.spread)
    assert "nan" in str(summary)
