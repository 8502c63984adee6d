"""What a verdict says, and what it never says."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from decathlon_mcp.grading.attempt import CallRecord
from decathlon_mcp.grading.verdict import Status, Verdict, verdict_of, verdict_without_grading
from tests.grading.scene import attempt_of, call_record

SCORED: dict[str, Any] = {"status": "scored", "success": True, "reward": 1.0}


def test_a_scored_verdict_has_reward_and_success() -> None:
    verdict = verdict_of(attempt_of(), **SCORED)
    assert (
        verdict.to_json().items() >= {"version": 1, "reward": 1.0, "success": True, "claimed": True}.items()
    )
    assert Verdict.model_validate(verdict.to_json()) == verdict


@pytest.mark.parametrize("status", [status for status in get_args(Status) if status != "scored"])
def test_without_a_score_there_is_no_reward_key(status: Status) -> None:
    verdict = verdict_without_grading(attempt_of(), status=status, detail="it\nbroke")
    assert not {"reward", "success"} & verdict.to_json().keys()
    assert verdict.text() == f"No verdict ({status}): it broke"
    assert Verdict.model_validate(verdict.to_json()) == verdict


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "timeout", "reward": 0.0},
        {"status": "timeout", "success": False},
        {"status": "scored", "reward": 0.0},
        {"status": "scored", "success": False},
        {**SCORED, "reward": math.nan},
        {**SCORED, "metrics": {"a": math.inf}},
        {**SCORED, "score": 2},
    ],
)
def test_a_verdict_that_contradicts_itself_cannot_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        verdict_of(attempt_of(), **fields)


def test_a_verdict_cannot_be_changed() -> None:
    verdict = verdict_of(attempt_of(), **SCORED)
    with pytest.raises(ValidationError):
        verdict.reward = 2.0  # pyright: ignore[reportAttributeAccessIssue]


def test_the_servers_own_counts_are_metrics() -> None:
    start = datetime(2026, 11, 21, tzinfo=UTC)
    attempt = attempt_of(started_at=start, claimed_at=start + timedelta(seconds=12.5), turns=4)
    assert verdict_without_grading(attempt, status="timeout", detail="").metrics == {
        "calls": 2.0,
        "failed_calls": 1.0,
        "tools_used": 2.0,
        "seconds": 12.5,
        "turns": 4.0,
    }


def test_one_line_says_what_the_reward_is_made_of() -> None:
    verdict = verdict_of(
        attempt_of(claimed=False, truncated=True),
        **SCORED,
        metrics={"correct_paper": 1.0, "calls < 20": 0.0},
        weights={"correct_paper": 1.0, "calls < 20": 0.1},
    )
    assert verdict.text() == (
        "Reward 1.0: the attempt succeeded (correct_paper 1.0 × 1.0, calls < 20 0.0 × 0.1), "
        "not claimed by the agent, closed by a limit."
    )


def test_times_are_iso_8601() -> None:
    verdict = verdict_of(attempt_of(started_at=datetime(2026, 11, 21, 1, 2, 3, tzinfo=UTC)), **SCORED)
    assert verdict.started_at == "2026-11-21T01:02:03.000+00:00"
    assert verdict.scored_at is not None
    assert datetime.fromisoformat(verdict.scored_at).tzinfo is not None


def test_long_words_are_cut_to_their_end() -> None:
    verdict = verdict_of(attempt_of(), **SCORED, evaluator_output="a" * 9000 + "end", detail="b" * 5000)
    assert len(verdict.evaluator_output) == 8192
    assert verdict.evaluator_output.endswith("end")
    assert len(verdict.detail) == 4000


def test_a_call_is_read_from_the_journal() -> None:
    record = call_record(7, result=None)
    event = {
        **{name: getattr(record, name) for name in CallRecord.__slots__},
        "event": "call",
        "at": "2026-11-21T00:00:00",
    }
    assert CallRecord.from_journal(event) == record
