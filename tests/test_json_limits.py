"""Limits on JSON's depth and number of nodes, compared with a decoder; and what the check costs."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decathlon_mcp.json_limits import JsonLimitError, check_json, count_nodes

MIB = 1 << 20
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.sampled_from(['"', "\\", '\\"[', "[{,:", "\\\\"]),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=60,
)


def nodes_of(value: Any) -> int:
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return 1 + sum(1 + nodes_of(item) for item in members.values()) + (not members)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return 1 + sum(map(nodes_of, items)) + (not items)
    return 1


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, cast("dict[str, Any]", value).values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, cast("list[Any]", value)), default=0)
    return 0


@settings(deadline=None, max_examples=15)
@given(VALUES, st.booleans())
def test_limits_are_exact_whatever_strings_contain(value: object, ascii_only: bool) -> None:
    nodes, depth = nodes_of(value), depth_of(value)
    try:
        data = json.dumps(value, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    assert check_json(data, max_depth=depth, max_nodes=nodes) >= nodes
    assert count_nodes(data) == nodes
    check_json(memoryview(data), max_depth=depth, max_nodes=nodes)
    if nodes > 1:
        with pytest.raises(JsonLimitError, match="values and keys"):
            check_json(data, max_depth=depth, max_nodes=nodes - 1)
    if depth > 0:
        with pytest.raises(JsonLimitError, match="deeper"):
            check_json(data, max_depth=depth - 1, max_nodes=nodes)


@settings(deadline=None)
@given(st.text(alphabet='[]{},:"\\u0a ', max_size=200))
def test_what_the_check_accepts_decodes_within_the_limits_or_not_at_all(text: str) -> None:
    try:
        check_json(text.encode(), max_depth=5, max_nodes=20)
    except JsonLimitError:
        return
    try:
        value = json.loads(text)
    except ValueError:
        return
    assert depth_of(value) <= 5
    assert nodes_of(value) <= 20


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-32"])
def test_other_encodings_that_json_loads_would_decode_are_refused(encoding: str) -> None:
    # U+2201 contains the byte of a quotation mark in UTF-16, which would hide all that follows.
    data = json.dumps(["\u2201", [[[[[]]]]]], ensure_ascii=False).encode(encoding)
    assert json.loads(data)
    with pytest.raises(JsonLimitError, match="UTF-8"):
        check_json(data, max_depth=2, max_nodes=100)


def filled(unit: bytes, before: bytes = b"", after: bytes = b"") -> bytes:
    """4 MiB of a repeated unit."""
    return before + (unit * (4 * MIB // len(unit) + 1))[: 4 * MIB] + after


HOSTILE = {
    "open brackets": filled(b"["),
    "empty arrays": filled(b"[],", b"[", b"]"),
    "nearly too many brackets": filled(b" ", b"[" * 50_000 + b"]" * 50_000),
    "empty strings": filled(b'"",'),
    "a string of brackets": filled(b"[", b'"', b'"'),
    "a string of escaped quotation marks": filled(b'\\"', b'"' + b"," * 100_000, b'"'),
    "half a million keys": filled(b'"a":1,', b"{", b'"b":1}'),
    "white space": filled(b" "),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_check_of_four_mebibytes_is_far_faster_than_their_decoding(name: str) -> None:
    # The best of five: other processes share the machine.
    durations_seconds: list[float] = []
    for _ in range(5):
        start = time.thread_time()
        with contextlib.suppress(JsonLimitError):
            check_json(HOSTILE[name])
        durations_seconds.append(time.thread_time() - start)
    assert min(durations_seconds) < 0.1


def test_text_of_four_mebibytes_passes_though_it_is_full_of_structure() -> None:
    for unit in ("a, b: [c] {d}\n", '{"key": "value"},\n', "C:\\path\\,"):
        data = json.dumps({"path": "x", "content": unit * (4 * MIB // len(unit) // 2)}).encode()
        check_json(data)
        msgspec.json.decode(data)


def test_deep_text_is_refused_before_a_decoder_could_recurse() -> None:
    for opening in (b"[", b'{"a":', b'[{"a":', b' [ \n"x",'):
        with pytest.raises(JsonLimitError):
            check_json(opening * 100_000)
        with pytest.raises(JsonLimitError, match="deeper than 128"):
            check_json(opening * 200)


LONG = "1" * 4_200


@pytest.mark.parametrize("between", ["", '\\"', '"\\"1"'])
def test_integers_whose_decoding_takes_long_are_refused(between: str) -> None:
    """A thousand of them took 250 ms, in which no other thread ran."""
    string = json.dumps(between)
    data = f"[{', '.join(f'{string}, {LONG}' for _ in range(1_000))}]".encode()
    with pytest.raises(JsonLimitError, match="long numbers"):
        check_json(data)


def test_digits_in_strings_and_some_long_integers_are_no_long_numbers() -> None:
    text = json.dumps([LONG * 200, f'"{LONG}' * 200, f"\\\\{LONG}\\" * 200, *[int(LONG)] * 4]).encode()
    check_json(text)
    assert json.loads(text)[-1] == int(LONG)
