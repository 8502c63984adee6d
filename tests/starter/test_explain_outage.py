"""explain-outage: only the correct final answer passes."""

from __future__ import annotations

import pytest

from tests.starter.bench import Bench
from tests.starter.conftest import LayOut

pytestmark = pytest.mark.anyio
TASK = "explain-outage"


@pytest.fixture
def attempt(lay_out: LayOut) -> Bench:
    return lay_out(TASK)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("OUTAGE: d-118 42 min 35 failed", "another deployment"),  # the last to go out before it
        ("OUTAGE: d-119 42 min 35 failed", "another deployment"),  # what billing's wrong clock suggests
        ("OUTAGE: d-117 48 min 35 failed", "did not last that long"),  # as the pager has it
        ("OUTAGE: d-117 42 min 39 failed", "another number"),  # with those that were no outage
        ("OUTAGE: d-118 42 min 35 failed\nOUTAGE: d-117 42 min 35 failed", "several"),
        ("It was d-117, for 42 minutes, and 35 requests.", "one OUTAGE line"),
        ("OUTAGE: d-117 42 min 35 failed\nAnything else?", "does not end with"),
        ("OUTAGE: d-117 42 min 35 failed, or so", "does not end with"),
        (" \n", "without an answer"),
        (None, "without an answer"),
    ],
)
def test_any_other_answer_fails(attempt: Bench, answer: str | None, reason: str) -> None:
    attempt.answer(answer)
    attempt.assert_fails(reason)


def test_the_line_may_be_set_off(attempt: Bench) -> None:
    attempt.answer("See the logs.\n\n`OUTAGE: d-117 42 min 35 failed`\n")
    assert attempt.evaluate().exit_code == 0


def test_the_answer_in_a_file_is_no_answer(attempt: Bench) -> None:
    (attempt.workspace / "answer.txt").write_text("OUTAGE: d-117 42 min 35 failed\n")
    attempt.assert_fails("without an answer")
