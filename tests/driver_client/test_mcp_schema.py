"""What MCP allows, and what is left of messages with a fault: generated, and judged by the SDK."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import msgspec
import pytest
from mcp_types.version import KNOWN_PROTOCOL_VERSIONS, LATEST_HANDSHAKE_VERSION

from decathlon_mcp.driver.mcp_schema import (
    MAX_GROWN_BYTES,
    MAX_READABLE_CHARACTERS,
    MAX_REPAIRED_NODES,
    LogParams,
    ProgressParams,
    read_result,
    repaired_result,
    valid_definition,
    valid_notification,
)
from decathlon_mcp.driver.replies import Reply, read_reply
from decathlon_mcp.errors import DriverError
from decathlon_mcp.types import as_json
from tests.fuzz.results import (
    SURFACES,
    definitions,
    nulls,
    refusal,
    results,
)


def read(result: Any) -> Reply:
    text = result if isinstance(result, str) else json.dumps(result)
    return read_reply(f'{{"result":{{"jsonrpc":"2.0","id":1,"result":{text}}}}}'.encode(), server="files")


def fault(result: Any) -> str | None:
    """Why a result is refused; None if it is not."""
    try:
        read_result(json.dumps(result).encode())
    except msgspec.ValidationError as error:
        return str(error)
    return None


def relayed(result: Any) -> Any:
    """What a client gets of a result; None for an error of the call."""
    try:
        return read(result).decoded()["result"]
    except DriverError:
        return None


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_what_an_sdk_client_accepts_without_conversion_is_relayed_unchanged(step: int) -> None:
    unchanged = 0
    for result in results()[::step]:
        if refusal("tools/call", LATEST_HANDSHAKE_VERSION, result, strict=True) is None:
            why = fault(result)
            # Null, and what other clients refuse.
            assert why is None or re.search("null|URI|Base64|regex|progressToken", why), (result, why)
            if why is None:
                unchanged += 1
                assert relayed(result) == result
    assert unchanged > 100 / step


def test_a_faulty_member_takes_none_of_its_neighbours_along() -> None:
    annotations = {"audience": ["user"], "priority": 5, "lastModified": "2025-02-29T00:00:00Z"}
    icons = [{"src": "data:,", "sizes": None}, {"src": None}, {"src": "data:,", "theme": "dark"}]
    link = {"type": "resource_link", "name": "n", "uri": "a:b", "icons": icons, "own": None}
    result = {"content": [{"type": "text", "text": "t", "annotations": annotations}, link], "own": [None]}
    assert relayed(result) == {
        "content": [
            {"type": "text", "text": "t", "annotations": {"audience": ["user"]}},
            {**link, "icons": [{"src": "data:,"}, {"src": "data:,", "theme": "dark"}]},
        ],
        "own": [None],
    }
    hints = {"title": None, "readOnlyHint": True}
    schema = {"properties": {"a": {"type": "string", "title": None}, "b": True, "c": False, "d": None}}
    assert valid_definition(
        {"description": None, "annotations": hints, "inputSchema": {**schema, "required": None}, "own": None}
    ) == {
        "annotations": {"readOnlyHint": True},
        "inputSchema": {
            "type": "object",
            "properties": {"a": {"type": "string", "title": None}, "b": {}, "c": {"not": {}}, "d": {}},
        },
        "own": None,
    }


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "video", "data": "AAAA"}, 'Invalid value \'video\' - at `$.type`]\n{"type":"video"}'),
        ({"type": "text", "text": None}, "Expected `str`, got `null` - at `$.text`]\n"),
        ({"type": "image", "data": "AA-_", "mimeType": "image/png"}, "it is not Base64]\n"),
        ({"type": "resource_link", "name": "notes", "uri": "/a"}, "`uri` is not a URI]\n"),
        (
            {"type": "resource", "resource": {"uri": "/a", "text": "words"}},
            "`uri` is not a URI - at `$.resource`]\nwords",
        ),
        (
            {"type": "resource", "resource": {"uri": "a:b", "blob": "="}},
            "it is not Base64 - at `$.resource`]\n",
        ),
        ("words", 'Expected `object`, got `str`]\n"words"'),
    ],
)
def test_an_item_that_cannot_be_valid_becomes_a_text_that_says_why(item: Any, text: str) -> None:
    fine = {"type": "text", "text": "fine"}
    replaced, kept = relayed({"content": [item, fine]})["content"]
    assert kept == fine
    assert replaced["type"] == "text"
    assert replaced["text"].startswith("[content that is not MCP: ")
    assert text in replaced["text"]


@pytest.mark.parametrize(
    ("result", "kept"),
    [
        ({"structuredContent": {"sum": 12}}, {"structuredContent": {"sum": 12}, "content": ['{"sum": 12}']}),
        (
            {"content": None, "structuredContent": {"a": 1}},
            {"structuredContent": {"a": 1}, "content": ['{"a": 1}']},
        ),
        ({"content": [], "structuredContent": None}, {"content": []}),
        ({"content": [], "isError": 1}, {"content": [], "isError": True}),
        ({"content": [], "isError": "maybe"}, {"content": []}),
        ({"content": [], "_meta": {"progressToken": None, "own": 1}}, {"content": [], "_meta": {"own": 1}}),
        (
            {"content": [], "_meta": {"io.modelcontextprotocol/related-task": {}}},
            {"content": [], "_meta": {}},
        ),
    ],
)
def test_what_is_kept_of_a_result(result: Any, kept: Any) -> None:
    texts = [{"type": "text", "text": text} for text in kept["content"]]
    assert relayed(result) == {**kept, "content": texts}


def test_what_would_be_long_to_repair_is_an_error() -> None:
    few, many = ([{"type": "x"}] * (MAX_REPAIRED_NODES // nodes) for nodes in (5, 2))
    assert relayed({"content": few}) is not None
    assert relayed({"content": many}) is None
    text = {"type": "text", "text": "a line"}
    assert relayed({"content": [{**text, "annotations": None}] * 1_250}) == {"content": [text] * 1_250}
    # Not counted: what is not looked at.
    assert (
        relayed({"content": [{"type": "x"}], "structuredContent": {"a": [0] * 2 * MAX_REPAIRED_NODES}})
        is not None
    )
    with pytest.raises(msgspec.ValidationError, match="too many faults"):
        repaired_result(json.dumps({"content": [{"type": "x", "text": "x" * MAX_GROWN_BYTES}]}).encode())


@pytest.mark.parametrize(
    ("text", "is_base64"),
    [
        *(("", True), ("AA==", True), ("AAA", True), ("AA\nAA\r\n", True)),
        *(("A", False), ("AA=", False), ("AA=A", False), ("AA-_", False), ("\u00c4AAA", False)),
    ],
)
def test_base64_is_what_atob_reads(text: str, is_base64: bool) -> None:
    why = fault({"content": [{"type": "image", "mimeType": "image/png", "data": text}]})
    assert (why is None) is is_base64, why


@pytest.mark.parametrize(
    ("result", "place"),
    [
        ('{"content":"x"}', "$.content"),
        ('{"content":null}', "`content`"),
    ],
)
def test_a_refused_result_is_an_error_that_names_the_place(result: str, place: str) -> None:
    with pytest.raises(DriverError, match="server files sent a result that is not MCP") as caught:
        read(result)
    assert place in caught.value.message
    assert caught.value.data == {"reason": "server"}


def test_the_error_of_a_refused_result_is_bounded() -> None:
    for result in ({"content": {"x" * 1_000_000: 1}}, {"content": "x" * 1_000_000}):
        with pytest.raises(DriverError) as caught:
            read(result)
        assert len(caught.value.message) < MAX_READABLE_CHARACTERS + 1_000


def test_no_definition_makes_an_sdk_client_refuse_the_list() -> None:
    for tool in definitions():
        definition = {**valid_definition(tool), "name": "name"}
        for version in KNOWN_PROTOCOL_VERSIONS:
            listing: dict[str, Any] = {"tools": [definition]}
            assert refusal("tools/list", version, listing) is None, (tool, definition)
            assert nulls(SURFACES["tools/list", version], listing) == [], (tool, definition)


RELATED = "io.modelcontextprotocol/related-task"
PROGRESS: Any = {"progress": 1, "total": 2, "message": "half", "_meta": {"a": 1}, "more": None}


@pytest.mark.parametrize(
    ("params_type", "params", "kept"),
    [
        (ProgressParams, PROGRESS, PROGRESS),
        (ProgressParams, {}, None),
        (ProgressParams, {"progress": True}, None),
        (ProgressParams, {"progress": 10**400}, None),
        (ProgressParams, {"progress": 1, "total": [], "message": None, "_meta": None}, {"progress": 1}),
        (
            ProgressParams,
            {"progress": 1, "_meta": {"a": 1, "progressToken": [], RELATED: {"taskId": 1}}},
            {"progress": 1, "_meta": {"a": 1}},
        ),
        (LogParams, {"level": "loud", "data": 1}, None),
        (LogParams, {"level": "info"}, None),
        (
            LogParams,
            {"level": "info", "data": None, "logger": None, "_meta": 5},
            {"level": "info", "data": None},
        ),
    ],
)
def test_of_notifications_what_mcp_does_not_allow_is_left_out(
    params_type: Any, params: Any, kept: Any
) -> None:
    assert valid_notification(msgspec.json.decode(as_json(params)), params_type) == kept


def test_long_notifications_with_faults_take_little_time() -> None:
    # A driver passes on a hundred notifications a second, and each took 15 ms of the event loop.
    meta: Any = {"progressToken": [], RELATED: 1}
    data: Any = [[] for _ in range(4_900)]
    params: Any = {"level": "info", "data": data, "logger": 1, "_meta": meta}
    started = time.process_time()
    for _ in range(50):
        assert valid_notification(params, LogParams) == {"level": "info", "data": data, "_meta": {}}
    assert time.process_time() - started < 0.2


def test_many_keys_of_this_server_in_a_reply_take_little_time() -> None:
    keys = {f"decathlon/{number:x}": 1 for number in range(13_000)}
    started = time.process_time()
    assert relayed({"content": [], "_meta": {**keys, "kept": 1}}) == {"content": [], "_meta": {"kept": 1}}
    assert time.process_time() - started < 0.5
