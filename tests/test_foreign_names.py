"""Names that clients send: shown, shortened, compared."""

from __future__ import annotations

import difflib
import random
import time

import pytest

from decathlon_mcp.validation import MAX_COMPARED, quoted, similar


def test_short_names_are_quoted_and_have_similar_ones() -> None:
    assert quoted("a'b") == '"a\'b"'
    assert similar("find-anwser", ["find-answer", "other"], count=3) == ["find-answer"]


def test_long_names_are_neither_shown_nor_compared() -> None:
    name = "n" * 60_000_000
    assert quoted(name) == "of 60,000,000 characters"
    started = time.process_time()
    assert similar(name, ["n" * 100, "n" * 300], count=3) == []
    assert time.process_time() - started < 1


def test_many_candidates_that_are_alike_take_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    ratio = difflib.SequenceMatcher[str].ratio

    def count(matcher: difflib.SequenceMatcher[str]) -> float:
        nonlocal compared
        compared += 1
        return ratio(matcher)

    monkeypatch.setattr(difflib.SequenceMatcher, "ratio", count)
    shuffled = random.Random(1)
    letters = "abc_" * 20
    candidates = ["".join(shuffled.sample(letters, len(letters))) for _ in range(2_000)]
    assert similar(letters, candidates, count=1, cutoff=0.2) != []
    # `difflib` asks twice for what is alike.
    assert 0 < compared <= 2 * MAX_COMPARED


def test_long_candidates_are_not_compared() -> None:
    assert similar("nnn", ["n" * 60_000_000, "nnnn"], count=3) == ["nnnn"]
