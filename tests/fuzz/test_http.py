"""The short form of `tests.fuzz.http`: the corpus and generated inputs at a server in this process."""

from __future__ import annotations

from tests.fuzz.http import CORPUS, run


def test_corpus_is_answered_without_faults() -> None:
    run(0, CORPUS)


def test_generated_requests_are_answered_without_faults() -> None:
    run(100)
