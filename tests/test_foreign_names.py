"""Names that clients send: shown, shortened, compared."""

from __future__ import annotations

import time

from decathlon_mcp.foreign_names import quoted, similar


def test_short_names_are_quoted_and_have_similar_ones() -> None:
    assert quoted("a'b") == '"a\'b"'
    assert similar("find-anwser", ["find-answer", "other"], count=3) == ["find-answer"]


def test_long_names_are_neither_shown_nor_compared() -> None:
    name = "n" * 60_000_000
    assert quoted(name) == "of 60,000,000 characters"
    started = time.process_time()
    assert similar(name, ["n" * 100, "n" * 300], count=3) == []
    assert time.process_time() - started < 1


def test_long_candidates_are_not_compared() -> None:
    assert similar("nnn", ["n" * 60_000_000, "nnnn"], count=3) == ["nnnn"]
