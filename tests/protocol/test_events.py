"""Ids of events, with which clients come back for an answer."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from typing import Any

import pytest

from decathlon_mcp.protocol.messages import EventId, Kind


@pytest.mark.parametrize("request_id", [0, -1, 7, "7", "", "a.b", 'ü\n%2E"', "x" * 126])
@pytest.mark.parametrize("agent", ["", "a" * 48])
@pytest.mark.parametrize("is_answer", [False, True])
def test_an_id_is_read_as_it_was_written(request_id: Any, agent: str, is_answer: bool) -> None:
    for kind in Kind:
        event_id = EventId(3, 12, kind, request_id, agent, is_answer)
        assert str(event_id).isascii()
        assert str(event_id).isprintable()
        assert EventId.parse(str(event_id)) == event_id


@pytest.mark.parametrize(
    "members",
    [
        [],
        [3],
        [3, 0, "call"],
        ["3", 0, "call", 7],
        [3, 0, "calls", 7],
        [3, 0, "call", None],
        [3, 0, "call", True],
        [3, 0, "call", 1.5],
        [3, 0, "call", "x" * 10_000],
        [3, 0, "call", "\ud800"],
        [3, 0, "call", 7, "a" * 1_000],
        [3, 0, "call", 7, "", False, "b"],
        {"generation": 3},
        "3.0.call.7",
    ],
)
def test_members_of_another_type_or_length_are_no_id(members: Any) -> None:
    assert EventId.parse(urlsafe_b64encode(json.dumps(members).encode()).decode()) is None


@pytest.mark.parametrize("text", ["", "3", "3.0.call.7", "é", "\ud800", "W10", "W10=" * 10_000])
def test_other_text_is_no_id(text: str) -> None:
    assert EventId.parse(text) is None
