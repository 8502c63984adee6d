"""Bodies of messages: what is read of them, and how those that cannot be read are answered."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from decathlon_mcp.protocol import messages
from decathlon_mcp.protocol.messages import McpError, read_message


def body(method: Any = "tools/call", **params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()


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
    [b"[]", b'{"a": "\xff"}', b'{"a": 1e999}', b"9" * 5000],
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


ESCAPED = b'{"a":"' + b'\\"' * (1 << 20)
"""A string that does not end, full of escaped quotation marks."""


@pytest.mark.parametrize("text", [ESCAPED, b'{"a":' + b" " * (1 << 21)], ids=["no end", "spaces"])
def test_the_id_of_a_large_unreadable_message_is_searched_for_in_a_moment(text: bytes) -> None:
    started = time.process_time()
    assert messages.readable_id(text) is None
    assert messages.readable_id(b'{"id":7,' + text) == 7
    assert time.process_time() - started < 2
