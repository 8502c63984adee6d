"""How tools are spelled."""

from __future__ import annotations

import pytest

from decathlon_mcp.suites.tool_names import spell
from decathlon_mcp.types import Names


@pytest.mark.parametrize(
    ("names", "spelled"),
    [("decathlon", "arxiv_local__search"), ("toolathlon", "arxiv_local-search"), ("raw", "search")],
)
def test_a_tool_is_spelled_as_asked(names: Names, spelled: str) -> None:
    assert spell(names, "arxiv_local", "search") == spelled


@pytest.mark.parametrize(
    ("names", "claim", "python"),
    [
        ("decathlon", "claim_done", "local__python-execute"),
        ("toolathlon", "local-claim_done", "local-python-execute"),
        ("raw", "claim_done", "python-execute"),
    ],
)
def test_claim_and_evaluate_stand_bare_but_for_toolathlons_claim(
    names: Names, claim: str, python: str
) -> None:
    assert spell(names, "local", "claim_done") == claim
    assert spell(names, "local", "evaluate") == "evaluate"
    assert spell(names, "local", "python-execute") == python


def test_a_servers_own_claim_done_is_its_own() -> None:
    assert spell("decathlon", "shop", "claim_done") == "shop__claim_done"


@pytest.mark.parametrize("names", ["decathlon", "toolathlon", "raw"])
def test_a_long_name_is_cut_to_64_characters_in_a_stable_way(names: Names) -> None:
    long = "fetch_" * 20
    first, second = spell(names, "server", long + "a"), spell(names, "server", long + "b")
    assert len(first) == len(second) == 64
    assert first != second
    assert spell(names, "server", long + "a") == first


def test_a_name_of_64_characters_stays() -> None:
    assert spell("raw", "server", "x" * 64) == "x" * 64
    assert spell("raw", "server", "x" * 65) == "x" * 55 + "_" + "9537c5fd"
