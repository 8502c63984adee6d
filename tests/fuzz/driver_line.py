"""Property of the driver's readers of task servers: whatever a server sends, only its own calls fail.

`check` feeds the same bytes to a session over lines, to the parser of server-sent events and to the reader of
an HTTP response.
"""

from __future__ import annotations

import http.client
import io
import json
from typing import Any

import msgspec
from decathlon_sandbox import wire
from decathlon_sandbox.http_client import HTTP_ERRORS, HttpExchange, SseParser
from decathlon_sandbox.mcp_session import Handshake, McpSession, ReplyHandler
from decathlon_sandbox.rpc import RequestError
from decathlon_sandbox.streams import LineSplitter
from decathlon_sandbox.strict_json import MAX_DEPTH, as_object
from decathlon_sandbox.truncation import cut, shorten

from decathlon_mcp.json_limits import check_json
from tests.fuzz.long_run import main

MODULES = (
    "decathlon_sandbox.http_client",
    "decathlon_sandbox.mcp_session",
    "decathlon_sandbox.streams",
    "decathlon_sandbox.strict_json",
    "decathlon_sandbox.truncation",
)
LIMIT_BYTES = 1500
CHUNK_BYTES = 7


class Outcome(ReplyHandler):
    """Records the outcome of a request, which must come at most once."""

    def __init__(self) -> None:
        self.outcomes: list[Any] = []

    def on_reply(self, message: dict[str, Any], line: bytes) -> None:
        self.outcomes.append(message)
        assert ("result" in message) != ("error" in message)
        # The line is embedded in the driver's output as it is.
        assert b"\n" not in line
        assert msgspec.json.decode(line) is not None
        check_json(line, max_depth=MAX_DEPTH)
        result = as_object(message.get("result"))
        if result is not None:
            shortened = cut(result, "/folder", 20)
            if shortened is not None:
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


class FakeSocket:
    """A socket from which an HTTP response is read."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def check(data: bytes) -> None:
    """Raise AssertionError, or an error that no reader may raise, if one misbehaves on these bytes."""
    _check_lines(data)
    _check_handshake(data)
    _check_events(data)
    _check_response(data)


def _session() -> tuple[McpSession, list[Outcome]]:
    sent: list[bytes] = []
    session = McpSession("files", lambda line, number: sent.append(line), lambda method, params: None)
    outcomes = [Outcome(), Outcome()]
    for outcome in outcomes:
        session.request("tools/call", {"name": "read", "_meta": {"progressToken": "t"}}, outcome)
    return session, outcomes


def _check_lines(data: bytes) -> None:
    session, outcomes = _session()
    lines = LineSplitter(LIMIT_BYTES, session.receive_line, session.receive_overlong)
    for start in range(0, len(data), CHUNK_BYTES):
        lines.feed(data[start : start + CHUNK_BYTES])
    session.fail_all(RequestError(wire.SERVER, "ended"))
    assert [len(outcome.outcomes) for outcome in outcomes] == [1, 1]


def _check_handshake(data: bytes) -> None:
    ends: list[Any] = []
    session = McpSession("files", lambda line, number: None, lambda method, params: None)
    Handshake(session, lambda version: None, ends.append, ends.append).start()
    for line in data.split(b"\n"):
        session.receive_line(line)
    session.fail_all(RequestError(wire.SERVER, "ended"))
    assert len(ends) == 1
    if isinstance(ends[0], dict):
        json.dumps(ends[0])


def _check_events(data: bytes) -> None:
    session, outcomes = _session()

    def deliver(kind: str, event: bytes) -> None:
        # As `http_servers` does: the data of an event may have several lines.
        session.receive_line(event.replace(b"\r", b" ").replace(b"\n", b" "))

    parser, code = SseParser(deliver, LIMIT_BYTES), wire.TOO_LONG
    try:
        for start in range(0, len(data), CHUNK_BYTES):
            parser.feed(data[start : start + CHUNK_BYTES])
    except RequestError as error:
        code = error.code
    assert code == wire.TOO_LONG
    session.fail_all(RequestError(wire.SERVER, "ended"))
    assert [len(outcome.outcomes) for outcome in outcomes] == [1, 1]


def _check_response(data: bytes) -> None:
    exchange = HttpExchange("http://127.0.0.1:1/mcp", 1.0)
    socket: Any = FakeSocket(data)
    response = http.client.HTTPResponse(socket, method="POST")
    try:
        response.begin()
        exchange.response = response
        body = exchange.body(LIMIT_BYTES)
    except HTTP_ERRORS:
        return
    assert body is None or len(body) <= LIMIT_BYTES


if __name__ == "__main__":
    main("tests.fuzz.driver_line", check, MODULES)
