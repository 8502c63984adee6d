"""Arguments that are JSON in a string, with `coerces_arguments` in suite.yaml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.grading import attempt_of
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.json_limits import MAX_DEPTH
from decathlon_mcp.plugins.toolathlon.toolathlon import MAX_STEPS, coerced_arguments
from decathlon_mcp.types import JsonObject
from tests.episodes.environment import make_call, running_registry, suite_with
from tests.fakes.driver import FakeCall, FakeTool
from tests.fakes.provider import FakeProvider

pytestmark = pytest.mark.anyio

POINT: JsonObject = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "name": {"type": "string"}},
    "additionalProperties": {"type": "integer"},
}


async def coerced(value: Any, schema: JsonObject) -> Any:
    """The argument `v` of a tool with this schema for it."""
    arguments, schema = json.dumps({"v": value}).encode(), {"type": "object", "properties": {"v": schema}}
    return json.loads(await coerced_arguments(arguments, schema))["v"]


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("7", {"type": "integer"}, 7),
        ("7.5", {"anyOf": [{"type": "null"}, {"oneOf": [{"type": "number"}]}]}, 7.5),
        ('["1", "x"]', {"type": "array", "items": {"type": "integer"}}, [1, "x"]),
        ('{"x": "1.5", "name": "2", "z": "3"}', POINT, {"x": 1.5, "name": "2", "z": 3}),
        ([{"x": "1"}], {"type": "array", "items": {"anyOf": [{"type": "null"}, POINT]}}, [{"x": 1}]),
        ({"a": "1"}, {"type": "object", "properties": {"a": {}}, "additionalProperties": POINT}, {"a": "1"}),
        ("[NaN]", {"type": "array"}, [None]),
    ],
)
async def test_a_string_becomes_what_the_schema_asks_for(
    value: Any, schema: JsonObject, expected: Any
) -> None:
    result = await coerced(value, schema)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ("[1]", {"type": "string"}),
        ("[1]", {"type": ["array", "string"]}),
        ("[1]", {}),
        ("[1]", {"$ref": "#/$defs/list"}),
        ("[1", {"type": "array"}),
        ("[1]", {"type": "object"}),
        ("1.0", {"type": "integer"}),
        ("null", {"type": ["integer", "null"]}),
        ("[1]", {"type": "array", "anyOf": "none", "properties": 1} | {"type": 7}),
    ],
)
async def test_other_arguments_stay_as_they_are(value: Any, schema: JsonObject) -> None:
    assert await coerced(value, schema) == value


async def test_json_over_a_limit_stays_a_string() -> None:
    deep = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)
    assert await coerced([deep, "[1]"], {"items": {"type": "array"}}) == [deep, [1]]


async def test_arguments_stay_as_they_are_if_the_schema_takes_too_long() -> None:
    options = [{"type": "null"}] * 1000
    many = ["[1]"] * (MAX_STEPS // len(options) + 1)
    assert await coerced(many, {"items": {"type": "array", "anyOf": options}}) == many


@pytest.mark.parametrize(("coerces", "size"), [(True, 20_000), (False, 1)])
async def test_a_server_gets_coerced_arguments_only_with_the_option(
    tmp_path: Path, coerces: bool, size: int
) -> None:
    received: list[JsonObject] = []

    async def note(call: FakeCall) -> str:
        received.append(call.arguments)
        return ""

    schema: JsonObject = {"type": "object", "properties": {"rows": {"type": "array"}}}
    provider = FakeProvider(tools={"probe": {"note": FakeTool(note, schema)}})
    suite = suite_with(tmp_path, coerces_arguments=coerces)
    async with running_registry(tmp_path, provider, suite=suite) as registry:
        episode = registry.start("find-answer", Principal())
        await episode.ready()
        text = json.dumps(["x"] * size)
        await make_call(episode, "probe__note", CallParams.of({"rows": text}))
        assert received == [{"rows": ["x"] * size if coerces else text}]
        await episode.claim_done("forty-two")
        verdict = await episode.evaluate()
        assert verdict.to_json().get("coerced_arguments") is (True if coerces else None)
        # The trajectory has what the model has sent.
        (call,) = attempt_of(episode).calls
        assert call.arguments == {"rows": text}
