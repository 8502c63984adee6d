"""Ids of events, with which clients come back for an answer."""

from __future__ import annotations

from typing import Any

import pytest

from decathlon_mcp.protocol.messages import EventId, Kind


@pytest.mark.parametrize("request_id", [0, -1, 7, "7", "", "a.b", 'ü\n%2E"', "last"])
@pytest.mark.parametrize("agent", ["", "a" * 48])
@pytest.mark.parametrize("is_answer", [False, True])
def test_an_id_is_read_as_it_was_written(request_id: Any, agent: str, is_answer: bool) -> None:
    for kind in Kind:
        event_id = EventId(3, 12, kind, request_id, agent, is_answer)
        assert str(event_id).isascii()
        assert EventId.parse(str(event_id)) == event_id


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "3.0.call",
        "3.x.call.7",
        "3.1.lost.call.7",
        "3.0.calls.7",
        "3.0.call.7.a.b",
        "3.0.call.true",
        "3.0.call.null",
        "3.0.call.%22%ED%A0%80%22",
        "3.0.call.%22%5Cud800%22",
        "3.0.call." + "7" * 10_000,
        "\ud800.0.call.7",
        "٣.0.call.7",
    ],
)
def test_what_is_no_id_is_not_read(text: str) -> None:
    assert EventId.parse(text) is None
