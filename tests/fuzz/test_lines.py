"""Both readers of foreign bytes on generated messages, on noise, and on the corpus of earlier long runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.lines import CHECKS, CORPUS, run


def test_no_bytes_confuse_a_reader() -> None:
    assert run(150) >= 150


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*_line/*")), ids=lambda file: file.name)
def test_corpus_of_earlier_runs(file: Path) -> None:
    CHECKS[file.parent.name](file.read_bytes())
