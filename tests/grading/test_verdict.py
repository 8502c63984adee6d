"""Verdicts: what they contain and how they are written."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
from pydantic import ValidationError

from decathlon_mcp.grading.attempt import UNANSWERED, CallRecord, Facts
from decathlon_mcp.grading.verdict import (
    REWARDED,
    Outcome,
    Status,
    Verdict,
    build_verdict,
    verdict_without_grading,
)
from tests.grading.support import make_attempt, make_call

PASSED = Outcome(status="scored", success=True, reward=1.0)


@pytest.mark.parametrize("status", [status for status in get_args(Status) if status not in REWARDED])
def test_verdict_without_a_score_has_no_reward_key(status: Status) -> None:
    verdict = verdict_without_grading(make_attempt(), status=status, detail="it\nbroke")
    assert not {"reward", "success"} & verdict.to_json().keys()
    assert verdict.text() == f"No verdict ({status}): it broke"
    assert Verdict.model_validate(verdict.to_json()) == verdict


def test_forfeited_attempt_has_a_reward_of_zero() -> None:
    verdict = verdict_without_grading(make_attempt(), status="forfeited", detail="out of memory")
    assert verdict.to_json().items() >= {"reward": 0.0, "success": False, "status": "forfeited"}.items()
    assert verdict.text() == "Reward 0.0: the attempt was forfeited: out of memory"
    assert Verdict.model_validate(verdict.to_json()) == verdict


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(status="sandbox_lost", reward=0.0),
        Outcome(status="sandbox_lost", success=False),
        Outcome(status="scored", reward=0.0),
        Outcome(status="scored", success=True, reward=math.nan),
        Outcome(status="scored", success=True, reward=1.0, metrics={"a": math.inf}),
        Outcome(status="scored", success=True, reward=2.0**53),
    ],
)
def test_inconsistent_verdict_is_rejected(outcome: Outcome) -> None:
    with pytest.raises(ValidationError):
        build_verdict(make_attempt(), outcome)


def test_what_a_plug_in_notes_is_a_member_of_the_verdict() -> None:
    facts = Facts(suite_revision="r1").with_(moon={"phase": "full"}, dense=True)
    verdict = build_verdict(replace(make_attempt(), facts=facts), PASSED)
    written = verdict.to_json()
    assert (written["moon"], written["dense"], written["suite_revision"]) == ({"phase": "full"}, True, "r1")
    assert Verdict.model_validate(written) == verdict


def test_text_lists_the_terms_of_the_reward() -> None:
    outcome = Outcome(
        status="scored",
        success=True,
        reward=1.0,
        metrics={"correct_paper": 1.0, "calls < 20": 0.0},
        weights={"correct_paper": 1.0, "calls < 20": 0.1},
    )
    assert build_verdict(make_attempt(claimed=False, truncated_by="client"), outcome).text() == (
        "Reward 1.0: the attempt succeeded (correct_paper 1.0 × 1.0, calls < 20 0.0 × 0.1), "
        "not claimed by the agent, closed by a limit."
    )


def test_long_texts_are_cut_to_their_end() -> None:
    outcome = Outcome(status="scored", success=True, reward=1.0, output="a" * 9000 + "end", detail="b" * 5000)
    verdict = build_verdict(make_attempt(), outcome)
    assert len(verdict.evaluator_output) == 8192
    assert verdict.evaluator_output.endswith("end")
    assert len(verdict.detail) == 4000


def test_lone_surrogates_are_replaced() -> None:
    outcome = Outcome(status="sandbox_lost", output="a\ud800b", detail="c\udfffd")
    verdict = build_verdict(make_attempt(), outcome, refused=("e\ud800f: a FIFO",))
    assert (verdict.evaluator_output, verdict.detail) == ("a?b", "c?d")
    assert verdict.refused == ("e?f: a FIFO",)


def test_a_call_without_a_reply_has_failed() -> None:
    record = make_call(7, result=None)
    call = {name: getattr(record, name) for name in CallRecord.__slots__ if name not in ("failed", "seconds")}
    found = CallRecord.of_lines(call, None)
    assert (found.failed, found.result, found.seconds) == (True, {"error": UNANSWERED}, 0.0)
