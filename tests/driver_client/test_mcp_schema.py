"""What MCP allows: our decoder compared with the SDK's own validation, over generated results."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from mcp_types.version import KNOWN_PROTOCOL_VERSIONS, LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION
from msgspec import Raw

from decathlon_mcp.driver_client.mcp_schema import (
    MAX_READABLE_CHARACTERS,
    LogParams,
    ProgressParams,
    is_valid_notification,
    read_result,
    valid_definition,
)
from decathlon_mcp.driver_client.messages import Message
from decathlon_mcp.driver_client.replies import Reply, read_reply
from decathlon_mcp.errors import DriverError
from decathlon_mcp.types import as_json
from tests.fuzz.results import definitions, refusal, results

ENVELOPES: dict[str, Any] = {LATEST_MODERN_VERSION: {"resultType": "complete"}}
"""What this server adds to a result in a revision."""


def read(result: Any) -> Reply:
    text = result if isinstance(result, str) else json.dumps(result)
    envelope = f'{{"jsonrpc":"2.0","id":1,"result":{text}}}'.encode()
    return read_reply(Message(result=Raw(envelope)), server="files", limit_bytes=1 << 22)


def fault(result: Any) -> str | None:
    """Why a result is refused; None if it is not."""
    try:
        read_result(json.dumps(result).encode())
    except msgspec.ValidationError as error:
        return str(error)
    return None


@pytest.mark.parametrize("version", KNOWN_PROTOCOL_VERSIONS)
def test_what_an_sdk_client_refuses_is_refused_here(version: str) -> None:
    compared = 0
    for result in results():
        refused = refusal("tools/call", version, {**result, **ENVELOPES.get(version, {})})
        if refused is not None:
            compared += 1
            assert fault(result) is not None, (result, refused)
    assert compared > 400


def test_what_an_sdk_client_accepts_without_conversion_is_accepted_here() -> None:
    accepted = 0
    for result in results():
        if refusal("tools/call", LATEST_HANDSHAKE_VERSION, result, strict=True) is None:
            why = fault(result)
            # 1.x refuses these.
            assert why is None or "URI" in why, (result, why)
            accepted += why is None
    assert accepted > 100


@pytest.mark.parametrize(
    ("result", "place"),
    [
        ("{}", "`content`"),
        ('{"content":"x"}', "$.content"),
        ('{"content":[{"type":"video","data":"AAAA"}]}', "$.content[0].type"),
        ('{"content":[],"isError":null}', "$.isError"),
        ('{"content":[],"isError":"maybe"}', "$.isError"),
        ('{"content":[],"structuredContent":[1]}', "$.structuredContent"),
        ('{"content":[],"_meta":5}', "$._meta"),
        ('{"content":[{"type":"text","text":"t","annotations":{"priority":5}}]}', "annotations.priority"),
        ('{"content":[{"type":"text","text":"t","annotations":{"audience":["x"]}}]}', "annotations.audience"),
        ('{"content":[{"type":"text","text":"t","type":"image"}]}', "$.content[0].type"),
        ('{"content":[{"type":"text","text":"t","x":1},{"type":"text","text":5}]}', "$.content[1].text"),
        ('{"content":[{"type":"text","text":"t","_meta":[]}]}', "$.content[0]._meta"),
        ('{"content":[{"type":"resource","resource":{"uri":"a:b"}}]}', "$.content[0].resource"),
        ('{"content":[{"type":"resource_link","name":"a","uri":"/a"}]}', "`uri` is not a URI"),
        ("[1]", "Expected `object`"),
    ],
)
def test_a_refused_result_is_an_error_that_names_the_place(result: str, place: str) -> None:
    with pytest.raises(DriverError, match="server files sent a result that is not MCP") as caught:
        read(result)
    assert place in caught.value.message
    assert caught.value.data == {"reason": "server"}


def test_the_text_of_a_refused_result_can_be_read() -> None:
    item = {"type": "text", "text": "the answer", "annotations": {"priority": 5}}
    with pytest.raises(DriverError, match=r"its text: first\nthe answer$"):
        read({"content": [{"type": "text", "text": "first"}, item, 7, {"text": 7}]})
    with pytest.raises(DriverError, match=r"its text: words$"):
        read({"content": "words"})
    with pytest.raises(DriverError, match=r'its text: \{"sum": 12\}$'):
        read({"sum": 12})


def test_the_error_of_a_refused_result_is_bounded() -> None:
    for result in ({"content": [{"type": "x" * 1_000_000}]}, {"content": "x" * 1_000_000}):
        with pytest.raises(DriverError) as caught:
            read(result)
        assert len(caught.value.message) < MAX_READABLE_CHARACTERS + 1_000


def test_no_definition_makes_an_sdk_client_refuse_the_list() -> None:
    for tool in definitions():
        definition = {**valid_definition(tool), "name": "name"}
        for version in KNOWN_PROTOCOL_VERSIONS:
            listing: dict[str, Any] = {"tools": [definition]}
            if version == LATEST_MODERN_VERSION:
                listing |= {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
            assert refusal("tools/list", version, listing) is None, (tool, definition)


def test_of_a_definition_only_what_is_at_fault_is_changed() -> None:
    changed = 0
    for tool in definitions():
        whole = {name: value for name, value in tool.items() if name != "outputSchema"}
        definition = valid_definition(tool)
        if refusal("tools/list", LATEST_HANDSHAKE_VERSION, {"tools": [{**whole, "name": ""}]}, strict=True):
            changed += definition != whole
            assert len(whole.keys() - definition.keys()) <= 1
        else:
            assert definition == whole
    assert changed > 100


@pytest.mark.parametrize(
    ("params", "is_valid"),
    [
        ({"progress": 1, "total": None, "message": "half", "_meta": {"a": 1}, "more": 1}, True),
        ({"progress": 0.5}, True),
        ({}, False),
        ({"progress": True}, False),
        ({"progress": "1"}, False),
        ({"progress": 10**400}, False),
        ({"progress": 1, "total": []}, False),
        ({"progress": 1, "message": 7}, False),
        ({"progress": 1, "_meta": []}, False),
    ],
)
def test_progress_that_mcp_does_not_allow_is_recognised(params: Any, is_valid: bool) -> None:
    assert is_valid_notification(msgspec.json.decode(as_json(params)), ProgressParams) is is_valid


@pytest.mark.parametrize(
    ("params", "is_valid"),
    [
        ({"level": "info", "data": None, "logger": "files"}, True),
        ({"level": "loud", "data": 1}, False),
        ({"level": ["info"], "data": 1}, False),
        ({"level": "info"}, False),
        ({"level": "info", "data": 1, "logger": 5}, False),
    ],
)
def test_log_messages_that_mcp_does_not_allow_are_recognised(params: Any, is_valid: bool) -> None:
    assert is_valid_notification(params, LogParams) is is_valid
