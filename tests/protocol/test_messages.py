"""Bodies of messages: what is read of them, and how those that cannot be read are answered."""

from __future__ import annotations

import json
import time
from typing import Any

import mcp_types
import pytest
from mcp_types import jsonrpc, version

from decathlon_mcp.protocol import messages
from decathlon_mcp.protocol.messages import McpError, read_message
from decathlon_mcp.protocol.requests import prefers_events


def body(method: Any = "tools/call", **params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()


NESTED: dict[str, Any] = {
    "name": "call_tool",
    "arguments": {"episode": "x", "name": "evaluate", "arguments": {}},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (body("initialize"), True),
        (body("tools/list"), True),
        (body("ping", note="initialize"), False),
        (body(name="probe__echo", arguments={"text": '"tools/list" evaluate progressToken'}), False),
        (body(name="probe__echo", _meta={"progressToken": 0}), True),
        (body(name="evaluate"), True),
        (body(name="local-claim_done"), True),
        (body(**NESTED), True),
        (body(**{**NESTED, "name": "close_episode"}), False),
    ],
)
def test_method_and_tool_decide_whether_events_are_preferred(text: bytes, expected: bool) -> None:
    assert prefers_events(read_message(text)) is expected


def test_arguments_of_a_call_are_the_clients_text_on_one_line() -> None:
    text = body(name="t", arguments="ARGUMENTS", _meta={"a": 1})
    arguments = b'{"b": 1.10, "a": [1e2, 12345678901234567890], "c": "\\u00fc"}'
    call = read_message(text.replace(b'"ARGUMENTS"', arguments))
    assert (call.arguments(), call.meta) == (arguments, {"a": 1})
    call = read_message(text.replace(b'"ARGUMENTS"', b'{"a":\r\n "\\n"\n}'))
    assert call.arguments() == b'{"a":"\\n"}'
    assert read_message(body(name="t", arguments=None)).arguments() is None
    assert read_message(body(name="t")).arguments() is None


@pytest.mark.parametrize(
    "arguments",
    [b'"x"', b"[]", b"5", b'{"a": "\xff"}', b'"\xff"', b'{"a": 1e999}', b"9" * 5000, b"-" + b"9" * 5000],
)
def test_arguments_that_are_no_object_or_no_json_are_refused(arguments: bytes) -> None:
    message = read_message(body(name="t", arguments="ARGUMENTS").replace(b'"ARGUMENTS"', arguments))
    with pytest.raises(McpError, match="`arguments`") as refusal:
        message.arguments()
    assert refusal.value.code == messages.INVALID_PARAMS


WHOLE = b'{"jsonrpc":"2.0","id":"a","method":"ping"}'
UNREADABLE = {
    "a surrogate": b'{"jsonrpc":"2.0","id":"a","method":"x","params":{"t":"\\ud83d"}}',
    "a surrogate before the id": b'{"method":"\\ud800","jsonrpc":"2.0","id":"a"}',
    "depth": b'{"jsonrpc":"2.0","id":"a","method":"x","params":' + b"[" * 3000 + b"]" * 3000 + b"}",
    "great depth": b'{"jsonrpc":"2.0","id":"a","method":"x","params":' + b'{"id":7,"a":' * 300_000,
    "no jsonrpc": b'{"id":"a","method":"ping"}',
    "jsonrpc 1.0": b'{"jsonrpc":"1.0","id":"a","method":"ping"}',
    "params an array": b'{"jsonrpc":"2.0","id":"a","method":"ping","params":[]}',
    "params a string": b'{"jsonrpc":"2.0","id":"a","method":"ping","params":"x"}',
    "NaN": b'{"jsonrpc":"2.0","id":"a","method":"x","params":{"arguments":NaN}}',
    "no UTF-8": b'{"jsonrpc":"2.0","id":"a","method":"\xff"}',
    "no end": WHOLE[:-1],
    "more after the end": WHOLE + b"x",
    "another id inside": b'{"jsonrpc":"2.0","params":{"id":7,"x":"\\ud800"},"id" : "a","method":"x"}',
    "a method that is no string": b'{"jsonrpc":"2.0","id":"a","method":5}',
    "_meta an array": b'{"jsonrpc":"2.0","id":"a","method":"x","params":{"_meta":[]}}',
    "a token that is no id": b'{"jsonrpc":"2.0","id":"a","method":"x",'
    b'"params":{"_meta":{"progressToken":1.5}}}',
}


def test_constants_are_those_of_the_sdk() -> None:
    assert tuple(version.HANDSHAKE_PROTOCOL_VERSIONS) == messages.HANDSHAKE_VERSIONS
    assert set(messages.SESSIONLESS_VERSIONS) <= set(version.MODERN_PROTOCOL_VERSIONS)
    keys = {
        messages.VERSION_KEY: mcp_types.PROTOCOL_VERSION_META_KEY,
        messages.CAPABILITIES_KEY: mcp_types.CLIENT_CAPABILITIES_META_KEY,
        messages.LOG_LEVEL_KEY: mcp_types.LOG_LEVEL_META_KEY,
        messages.SERVER_INFO_KEY: mcp_types.SERVER_INFO_META_KEY,
    }
    assert all(ours == theirs for ours, theirs in keys.items())
    codes = ("PARSE_ERROR", "INVALID_REQUEST", "METHOD_NOT_FOUND", "INVALID_PARAMS", "INTERNAL_ERROR")
    assert all(getattr(messages, name) == getattr(jsonrpc, name) for name in codes)
    assert messages.UNSUPPORTED_VERSION == jsonrpc.UNSUPPORTED_PROTOCOL_VERSION
    assert messages.MISSING_CLIENT_CAPABILITY == jsonrpc.MISSING_REQUIRED_CLIENT_CAPABILITY


ESCAPED = b'{"a":"' + b'\\"' * (1 << 20)
"""A string that does not end, full of escaped quotation marks."""


@pytest.mark.parametrize(
    "text",
    [ESCAPED, ESCAPED + b"\\", ESCAPED.replace(b'"\\', b'"\\\n'), b'{"a":' + b" " * (1 << 21)],
    ids=["no end", "a last backslash", "line breaks", "spaces"],
)
def test_the_id_of_a_large_unreadable_message_is_searched_for_in_a_moment(text: bytes) -> None:
    started = time.process_time()
    assert messages.readable_id(text) is None
    assert messages.readable_id(b'{"id":7,' + text) == 7
    assert time.process_time() - started < 2


def test_only_one_byte_order_mark_is_ignored() -> None:
    mark = b"\xef\xbb\xbf"
    assert read_message(mark + WHOLE).request_id == "a"
    with pytest.raises(McpError) as refusal:
        read_message(mark * 100_000 + WHOLE)
    assert refusal.value.code == messages.PARSE_ERROR
