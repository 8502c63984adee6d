"""What the driver makes of the lines of a task's server: only the call that a line answers fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
from decathlon_sandbox import wire
from decathlon_sandbox.byte_streams import LineSplitter
from decathlon_sandbox.driver_requests import RequestError
from decathlon_sandbox.mcp_session import McpSession, ReplyHandler
from decathlon_sandbox.strict_json import MAX_NODES


class Call(ReplyHandler):
    """Records the outcomes of a call: replies, lines of replies, and errors."""

    def __init__(self) -> None:
        self.replies: list[dict[str, Any]] = []
        self.lines: list[bytes] = []
        self.errors: list[RequestError] = []

    def on_reply(self, message: dict[str, Any], line: bytes) -> None:
        self.replies.append(message)
        self.lines.append(line)

    def on_error(self, error: RequestError) -> None:
        self.errors.append(error)


class Session:
    """A session, what it has sent, and a first call that is not answered, besides those that a test makes."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []
        self._session = McpSession("files", self._sent.append, lambda method, params: None)
        self._lines = LineSplitter(5_000_000, self._session.receive_line, self._session.receive_overlong)
        self.other, _ = self.call()

    def call(self, **params: Any) -> tuple[Call, int]:
        call = Call()
        return call, self._session.request("tools/call", params, call)

    def receive(self, line: str, *, size: int = 1 << 20) -> None:
        data = line.encode("utf-8", "surrogateescape") + b"\n"
        for start in range(0, len(data), size):
            self._lines.feed(data[start : start + size])

    def sent(self) -> Any:
        """The last message."""
        return json.loads(self._sent[-1])

    def answer(self, line: str, *, size: int = 1 << 20) -> Call:
        """Make a call and receive this line, in which `$id` stands for its id."""
        call, request_id = self.call()
        self.receive(line.replace("$id", str(request_id)), size=size)
        assert not self.other.replies + self.other.errors
        return call


@pytest.fixture
def session() -> Session:
    return Session()


MALFORMED = [
    '{"jsonrpc":"2.0","id":$id,"result":{"x":NaN}}',
    '{"jsonrpc":"2.0","id":$id,"result":{"x":1e999}}',
    '{"jsonrpc":"2.0","id":$id,"result":{"x":"\x01"}}',
    '{"jsonrpc":"2.0","id":$id,"result":{"x":',
    '{"jsonrpc":"2.0","id":$id}',
    '{"jsonrpc":"2.0","id":$id,"result":' + '{"x":' * 160 + "1" + "}" * 161,
    '{"jsonrpc":"2.0","id":$id,"result":{"x":' + "[" * 100_000 + "]" * 100_000 + "}}",
    '{"jsonrpc":"2.0","id":$id,"result":{"x":"\udcff"}}',
    '{"jsonrpc":"2.0","id":$id,"result":[' + "[]," * (MAX_NODES + 1) + "0]}",
]


@pytest.mark.parametrize("line", MALFORMED, ids=lambda line: line[24:60])
def test_malformed_reply_fails_its_call(session: Session, line: str) -> None:
    (error,) = session.answer(line).errors
    assert error.code == wire.SERVER
    assert "not JSON" in error.message or "neither a result nor an error" in error.message


RESULT = '{"jsonrpc":"2.0","id":$id,"result":{"a":1}'
LENIENT = {
    "id as text": '{"jsonrpc":"2.0","id":"$id","result":{"a":1}}',
    "null beside a result": RESULT + ',"error":null}',
    "null method": '{"jsonrpc":"2.0","id":$id,"method":null,"params":null,"result":{"a":1}}',
}
"""Replies that both Python SDKs take as results."""


@pytest.mark.parametrize("line", LENIENT.values(), ids=LENIENT)
def test_replies_that_the_sdks_take_are_taken(session: Session, line: str) -> None:
    assert session.answer(line).replies[0]["result"] == {"a": 1}


def test_unpaired_surrogates_are_replaced_and_the_rest_is_kept(session: Session) -> None:
    r"""Servers in JavaScript cut texts by UTF-16 units; strict parsers refuse the remaining half pairs."""
    result = r'{"a":"\ud83d\ude00\ud83d","b":"\ude00\\ud83d\\\ud83dx","\uDBFF":1}'
    (line,) = session.answer('{"jsonrpc":"2.0","id":$id,"result":' + result + "}").lines
    expected = {"a": "\U0001f600\ufffd", "b": "\ufffd\\ud83d\\\ufffdx", "\ufffd": 1}
    assert json.loads(line)["result"] == expected


def test_second_replies_and_replies_with_unknown_ids_are_ignored(session: Session) -> None:
    call = session.answer(RESULT + "}\n" + RESULT.replace("1}", "2}") + "}")
    for strange in ("99", '"x"', "[]", "{}", "true", "1.0", '"' + "9" * 100 + '"'):
        session.receive('{"jsonrpc":"2.0","id":' + strange + ',"result":{}}')
    assert [reply["result"] for reply in call.replies] == [{"a": 1}]
    assert not session.other.replies


@pytest.mark.parametrize("id_first", [True, False])
def test_overlong_reply_fails_its_call(session: Session, id_first: bool) -> None:
    long = '"result":"' + "x" * 5_000_001 + '"'
    line = '{"jsonrpc":"2.0","id":$id,' + long + "}" if id_first else "{" + long + ',"id":$id}'
    (error,) = session.answer(line).errors
    assert (error.code, "a line of more than" in error.message) == (wire.TOO_LONG, True)
    assert session.answer(RESULT + "}").replies


def test_requests_of_a_server_are_declined_and_pings_are_answered(session: Session) -> None:
    session.receive('{"jsonrpc":"2.0","id":"q","method":"ping"}')
    assert session.sent() == {"jsonrpc": "2.0", "id": "q", "result": {}}
    session.receive('{"jsonrpc":"2.0","id":"q","method":"sampling/createMessage","params":{}}')
    assert session.sent()["error"]["code"] == -32601
