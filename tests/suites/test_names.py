"""The spellings of tool names."""

from __future__ import annotations

import pytest

from decathlon_mcp.suites.prompts import spell
from decathlon_mcp.types import Names


@pytest.mark.parametrize(
    ("names", "spelled"),
    [
        ("decathlon", "arxiv-latex__get-prompt"),
        ("toolathlon", "arxiv-latex-get-prompt"),
        ("verified", "arxiv_latex_get_prompt"),
        ("raw", "get-prompt"),
    ],
)
def test_a_tool_name_in_each_spelling(names: Names, spelled: str) -> None:
    assert spell(names, "arxiv-latex", "get-prompt") == spelled


@pytest.mark.parametrize(
    ("names", "claim", "python"),
    [
        ("decathlon", "claim_done", "local__python-execute"),
        ("toolathlon", "local-claim_done", "local-python-execute"),
        ("verified", "local_claim_done", "local_python_execute"),
        ("raw", "claim_done", "python-execute"),
    ],
)
def test_claim_done_has_a_prefix_only_in_toolathlons_spellings(names: Names, claim: str, python: str) -> None:
    assert spell(names, "local", "claim_done") == claim
    assert spell(names, "local", "evaluate") == "evaluate"
    assert spell(names, "local", "python-execute") == python


def test_a_tool_of_a_server_may_be_called_claim_done() -> None:
    assert spell("decathlon", "shop", "claim_done") == "shop__claim_done"


@pytest.mark.parametrize("names", ["decathlon", "toolathlon", "verified", "raw"])
def test_a_long_name_is_always_shortened_to_the_same_64_characters(names: Names) -> None:
    long = "fetch_" * 20
    first, second = spell(names, "server", long + "a"), spell(names, "server", long + "b")
    assert len(first) == len(second) == 64
    assert first != second
    assert spell(names, "server", long + "a") == first


def test_a_name_of_64_characters_is_not_shortened() -> None:
    assert spell("raw", "server", "x" * 64) == "x" * 64
    assert spell("raw", "server", "x" * 65) == "x" * 55 + "_" + "9537c5fd"
