"""What counts as the same verdict, and what counts as a mistake."""

from __future__ import annotations

import io

import openpyxl
import pytest

from tools.fidelity.files import with_mistake
from tools.fidelity.results import Attempt, Result


@pytest.mark.parametrize(
    ("reward", "status", "exit_code", "agrees"),
    [
        (1.0, "scored", 0, True),
        (0.0, "scored", 1, True),
        (0.0, "scored", 0, False),
        (1.0, "scored", 1, False),
        (0.0, "evaluator_timed_out", 1, False),
        (None, "sandbox_lost", 1, False),
    ],
)
def test_only_a_scored_verdict_with_upstreams_exit_code_agrees(
    reward: float | None, status: str, exit_code: int, agrees: bool
) -> None:
    attempt = Attempt(reward=reward, status=status, exit_code=exit_code)
    assert attempt.agrees is agrees
    assert ("differs" in str(attempt)) is not agrees


def test_a_rewarded_attempt_with_a_mistake_is_unexpected_although_both_agree() -> None:
    rewarded = Attempt(reward=1.0, status="scored", exit_code=0)
    assert [Result("task", kind, rewarded).as_expected for kind in ("right", "wrong", "nothing")] == [
        True,
        False,
        False,
    ]


def test_mistakes_change_texts_and_numbers_of_tables_and_keep_removals() -> None:
    book = openpyxl.Workbook()
    book.worksheets[0].append(["total", 7])
    stored = io.BytesIO()
    book.save(stored)
    changed = with_mistake({"a.xlsx": stored.getvalue(), "b.md": b"Actual: 131.1g", "c.xlsx": None})
    assert changed["b.md"] == b"Actual: 242.2g"
    assert changed["c.xlsx"] is None
    table = openpyxl.load_workbook(io.BytesIO(changed["a.xlsx"] or b"")).worksheets[0]
    assert [cell.value for cell in table[1]] == ["total", 8]
