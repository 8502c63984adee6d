"""Property of the driver's readers of task servers: whatever a server sends, only its own calls fail.

`check` feeds the same bytes to a session with calls in progress, and to one during its handshake.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from decathlon_sandbox import wire
from decathlon_sandbox.byte_streams import LineSplitter
from decathlon_sandbox.driver_requests import RequestError
from decathlon_sandbox.mcp_session import Handshake, McpSession, ReplyHandler
from decathlon_sandbox.strict_json import MAX_DEPTH, as_object
from decathlon_sandbox.truncation import cut, shorten

from decathlon_mcp.json_limits import check_json

LIMIT_BYTES = 1500
CHUNK_BYTES = 7


class Outcome(ReplyHandler):
    """Records the outcome of a request, which must come at most once."""

    def __init__(self) -> None:
        self.outcomes: list[Any] = []

    def on_reply(self, message: dict[str, Any], line: bytes) -> None:
        self.outcomes.append(message)
        # Some servers send both, of which one is null.
        assert "result" in message or "error" in message
        # The line is embedded in the driver's output as it is.
        assert b"\n" not in line
        assert msgspec.json.decode(line) is not None
        check_json(line, max_depth=MAX_DEPTH)
        result = as_object(message.get("result"))
        if result is not None:
            if (shortened := cut(result, "/folder", 20)) is not None:
                assert shortened.full_text is not None
                assert shortened.full_text[:20] in shortened.result["content"][0]["text"]
                json.dumps(shortened.result)
            if (short := shorten(result, 20)) is not None:
                assert short.characters > 20
                json.dumps(short.result)

    def on_error(self, error: RequestError) -> None:
        self.outcomes.append(error)
        assert error.code in wire.REASONS

    def on_progress(self, params: dict[str, Any]) -> None:
        json.dumps(params)


def new_session() -> McpSession:
    return McpSession("files", lambda line: None, lambda method, params: None)


def check(data: bytes) -> None:
    """Raise AssertionError, or an error that no reader may raise, if one misbehaves on these bytes."""
    session, outcomes = new_session(), [Outcome(), Outcome()]
    for outcome in outcomes:
        session.request("tools/call", {"name": "read", "_meta": {"progressToken": "t"}}, outcome)
    lines = LineSplitter(LIMIT_BYTES, session.receive_line, session.receive_overlong)
    for start in range(0, len(data), CHUNK_BYTES):
        lines.feed(data[start : start + CHUNK_BYTES])
    session.fail_all(RequestError(wire.SERVER, "ended"))
    assert [len(outcome.outcomes) for outcome in outcomes] == [1, 1]
    ends: list[Any] = []
    session = new_session()
    Handshake(session, ends.append, ends.append).start()
    for line in data.split(b"\n"):
        session.receive_line(line)
    session.fail_all(RequestError(wire.SERVER, "ended"))
    assert len(ends) == 1
    if isinstance(ends[0], dict):
        json.dumps(ends[0])
