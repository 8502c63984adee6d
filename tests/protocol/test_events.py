"""Ids of events, with which clients come back for an answer."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from typing import Any

import pytest

from decathlon_mcp.protocol.messages import EventId


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
