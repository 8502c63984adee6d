"""The spellings of tool names."""

from __future__ import annotations

import pytest

from decathlon_mcp.suites.prompts import spell
from decathlon_mcp.types import Names


@pytest.mark.parametrize(
    ("names", "spelled", "claim", "python"),
    [
        ("decathlon", "arxiv-latex__get-prompt", "claim_done", "local__python-execute"),
        ("toolathlon", "arxiv-latex-get-prompt", "local-claim_done", "local-python-execute"),
        ("verified", "arxiv_latex_get_prompt", "local_claim_done", "local_python_execute"),
        ("raw", "get-prompt", "claim_done", "python-execute"),
    ],
)
def test_tools_in_each_spelling(names: Names, spelled: str, claim: str, python: str) -> None:
    assert spell(names, "arxiv-latex", "get-prompt") == spelled
    assert spell(names, "local", "claim_done") == claim
    assert spell(names, "local", "evaluate") == "evaluate"
    assert spell(names, "local", "python-execute") == python


def test_a_name_of_64_characters_is_not_shortened() -> None:
    assert spell("raw", "server", "x" * 64) == "x" * 64
    assert spell("raw", "server", "x" * 65) == "x" * 55 + "_" + "9537c5fd"
