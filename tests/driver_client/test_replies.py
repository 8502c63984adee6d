"""`Reply`: what is relayed unchanged, what is removed, and what a hostile sandbox cannot get through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decathlon_mcp.driver.replies import OVERLONG_KEY, OWN_PREFIX, Reply, read_reply
from decathlon_mcp.errors import DriverError, LimitExceededError


def read(result: str | bytes, *, overlong: str = "") -> Reply:
    """The reply in a driver's response, whose server sent this text as its result."""
    text = result.encode() if isinstance(result, str) else result
    member = f'"overlong":{overlong},'.encode() if overlong else b""
    line = b'{"jsonrpc":"2.0","id":7,%b"result":{"jsonrpc":"2.0","id":1,"result":%b}}' % (member, text)
    return read_reply(line, server="files")


def text_of(reply: Reply) -> str:
    assert reply.result is not None
    return reply.result.decode()


@pytest.mark.parametrize(
    "result",
    [
        '{"content":[{"type":"text","text":"a\\u0064\\n\\"\\/ é \\ud83d\\ude00"}],"x":[1.0,1E2,-0,0.10]}',
        '{"structuredContent":{"_meta":{"decathlon/verdict":1}},"content":[{"type":"text","text":"t"}]}',
        '{"content":[{"text":"t","_meta":{"other":[ 1 ]},"type":"text","x":{ }}],"_meta":{"a":{ }}}',
        '{"content":[],"count":123456789012345678901234567890,"hash":"a1e99999","digits":"%s"}' % ("7" * 500),
    ],
)
def test_a_result_is_relayed_as_its_server_sent_it(result: str) -> None:
    reply = read(result)
    assert text_of(reply) == result
    assert reply.decoded() == {"result": json.loads(result)}
    assert (reply.is_error, reply.error) == (False, None)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ('"_meta":{"\\u0064ecathlon\\/x":1}', '"_meta":{}'),
        ('"\\u005fmeta":{"DECATHLON/x":1}', '"_meta":{}'),
        ('"content":[{%s"_meta":{"decathlon/x":1}}]', '"content":[{%s"_meta":{}}]'),
        # Parsers differ in which of two members with one name they read; Go merges them.
        ('"_meta":{"decathlon/x":1},"_meta":{"a":1}', '"_meta":{"a":1}'),
        ('"content":[{%s"_meta":{"decathlon/x":1}}],"content":[]', '"content":[]'),
        ('"content":[{%s"_meta":{"decathlon/x":1},"_meta":{}}]', '"content":[{%s"_meta":{}}]'),
        ('"_meta":{"decathlon/x":1,"decathlon/x":2,"a":1}', '"_meta":{"a":1}'),
        (
            '"content":[{"type":"resource","resource":{"uri":"a:b","text":"","_meta":{"decathlon/x":1}}}]',
            '"content":[{"type":"resource","resource":{"uri":"a:b","text":"","_meta":{}}}]',
        ),
        (
            '"content":[{"type":"resource","resource":{"uri":"a:b","_meta":{"decathlon/x":1},"text":""},"resource":R}]'.replace(
                "R", '{"uri":"a:b","text":""}'
            ),
            '"content":[{"type":"resource","resource":{"uri":"a:b","text":""}}]',
        ),
    ],
)
def test_keys_of_this_server_are_removed_however_they_are_written(result: str, expected: str) -> None:
    text, beginning = '"type":"text","text":"t",', '{"content":[],'
    reply = read(f"{beginning}{result.replace('%s', text)}}}")
    # The last of the members with one name, at the place of the first.
    relayed = f"{{{expected.replace('%s', text)}}}" if "content" in expected else f"{beginning}{expected}}}"
    assert text_of(reply) == relayed
    assert reply.meta == json.loads(relayed).get("_meta", {})
    assert not any(OWN_PREFIX in key for key in reply.meta)


@pytest.mark.parametrize(
    "value",
    [
        "NaN",
        "1e999",
        "1" * 299 + "e20",
        "9" * 5000,
        "01",
        '"\\ud800"',
        '"\\ud800\\u0041"',
        '"\\x41"',
        '"a\tb"',
        "[1,]",
    ],
)
def test_text_that_some_client_cannot_read_is_refused(value: str) -> None:
    with pytest.raises(DriverError) as caught:
        read(f'{{"content":[{{"type":"text","text":{value}}}]}}')
    assert caught.value.data["reason"] in ("server", "invalid_reply")


@pytest.mark.parametrize("value", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
def test_text_that_is_not_utf8_is_refused(value: bytes) -> None:
    for template in (b'{"text":"%b"}', b'{"%b":1}', b'{"content":[{"%b":1}]}', b'{"_meta":{"%b":1}}'):
        with pytest.raises(DriverError):
            read(template % value)


@pytest.mark.parametrize(
    "result",
    [
        '{"a":%s}' % ("[" * 130 + "]" * 130),
        '{{"a":[{}]}}'.format(",".join(["1"] * 100_001)),
        '{"content":[],"_meta":{"a":%s}}' % ("[" * 130 + "]" * 130),
        '{{"content":[],"structuredContent":{{"a":[{}]}}}}'.format(",".join(["1"] * 100_001)),
        '{{"content":[{{"type":"text","text":"","annotations":{{"audience":[{}]}}}}]}}'.format(
            ",".join(['"user"'] * 100_001)
        ),
    ],
)
def test_a_reply_over_a_limit_is_refused(result: str) -> None:
    with pytest.raises(LimitExceededError):
        read(result)


def test_a_reply_that_would_exhaust_the_stack_is_refused() -> None:
    with pytest.raises(DriverError):
        read("[" * 400_000)


def test_white_space_cannot_break_a_line() -> None:
    """Carriage returns end lines in a stream of events."""
    items = '[ {"type":"text","text":"\\r"}\r]'
    reply = read(f'{{\r"a"\r:[1,\r{{"b":2\r}}],"content":{items},"_meta":{{\r"c":\r3}}}}\r')
    assert "\r" not in text_of(reply)
    content = [{"type": "text", "text": "\r"}]
    assert reply.decoded() == {"result": {"a": [1, {"b": 2}], "content": content, "_meta": {"c": 3}}}


def test_the_place_of_an_overlong_result_is_added() -> None:
    reply = read('{"content":[],"_meta":{"decathlon/overlong":1}}', overlong='{"path":"/a","characters":9}')
    value: Any = {OVERLONG_KEY: {"path": "/a", "characters": 9}}
    assert reply.meta == value
    assert reply.decoded() == {"result": {"content": [], "_meta": value}}
    assert read('{"content":[]}', overlong='{"path":5}').meta == {}
