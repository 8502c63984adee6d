"""Lock files, which `make demo` and `make test` install."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_every_package_is_pinned_with_hashes_and_no_index_is_named(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    packages = [line for line in text.splitlines() if line[:1].isalnum()]
    assert packages
    for package in packages:
        assert re.match(r"[a-z0-9.-]+==\S+", package), package
        assert package.endswith(" \\"), f"{package} has no hash"
    assert not re.search(r"://|--index|--find-links|-f ", text)
