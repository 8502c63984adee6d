"""Bodies of requests, read as far as the server needs them before it serves them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decathlon_mcp.protocol.requests import CALL, LIST, Envelope, McpRequest


def body(method: Any = "tools/call", **params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()


def escaped(text: bytes, word: bytes) -> bytes:
    """The text with every letter of a word as an escape."""
    return text.replace(word, b"".join(b"\\u%04x" % letter for letter in word))


NESTED: dict[str, Any] = {
    "name": "call_tool",
    "arguments": {"episode": "x", "name": "evaluate", "arguments": {}},
}


@pytest.mark.parametrize(
    ("text", "prefers_sse"),
    [
        (body("initialize"), True),
        (body("tools/list"), True),
        (escaped(body("tools/list"), b"list"), True),
        (body("ping", note="initialize"), False),
        (body(name="probe__echo", arguments={"text": '"tools/list" evaluate progressToken'}), False),
        (body(name="probe__echo", _meta={"progressToken": 0}), True),
        (escaped(body(name="probe__echo", _meta={"progressToken": 0}), b"progressToken"), True),
        (body(name="evaluate"), True),
        (escaped(body(name="evaluate"), b"evaluate"), True),
        (body(name="local-claim_done"), True),
        (body(**NESTED), True),
        (body(**{**NESTED, "name": "close_episode"}), False),
        (body(name="evaluate", arguments={"x": 1}).replace(b"1}", b"NaN}"), True),
        (body(**NESTED).replace(b'"x"', b"Infinity"), True),
        (b'{"method": "tools/list", "params": []}', True),
        (b"[]", False),
        (b"{", False),
        (b'{"method": 5}', False),
        (b'{"method": "tools/call", "params": {"name": 5, "_meta": 5, "arguments": 5}}', False),
    ],
)
def test_parsed_method_decides_whether_a_stream_is_preferred(text: bytes, prefers_sse: bool) -> None:
    assert Envelope.read(text).prefers_sse is prefers_sse


def test_only_a_call_of_its_tool_starts_an_episode() -> None:
    assert Envelope.read(body(name="start_episode")).starts_episode
    assert Envelope.read(escaped(body(name="start_episode"), b"start")).starts_episode
    assert not Envelope.read(body(name="list_tasks", arguments={"text": "start_episode"})).starts_episode


def test_arguments_of_a_call_are_the_clients_text_on_one_line() -> None:
    text = body(name="t", arguments="ARGUMENTS", _meta={"a": 1})
    arguments = b'{"b": 1.10, "a": [1e2, 12345678901234567890], "c": "\\u00fc"}'
    call = McpRequest.read(text.replace(b'"ARGUMENTS"', arguments))
    assert call == McpRequest(1, CALL, "t", arguments, {"a": 1})
    call = McpRequest.read(text.replace(b'"ARGUMENTS"', b'{"a":\r\n "\\n"\n}'))
    assert call is not None
    assert call.arguments == b'{"a":"\\n"}'


@pytest.mark.parametrize("arguments", [b'"x"', b"[]", b'{"a": "\xff"}', b'{"a": NaN}', b'{"a": 1e999}', b"{"])
def test_arguments_that_only_the_sdk_can_judge_are_no_call(arguments: bytes) -> None:
    assert McpRequest.read(body(name="t", arguments="ARGUMENTS").replace(b'"ARGUMENTS"', arguments)) is None


def test_lists_and_calls_differ_by_their_method_alone() -> None:
    assert McpRequest.read(body("tools/list", _meta={"a": 1})) == McpRequest(1, LIST, meta={"a": 1})
    call = McpRequest.read(body(name="t", arguments={"text": '"method":"tools/list"'}))
    assert call is not None
    assert (call.method, call.name) == (CALL, "t")
    assert McpRequest.read(body("tools/list", cursor="1")) is None
    assert McpRequest.read(body("ping")) is None
