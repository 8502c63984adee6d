"""Forms from JSON schemas: fields, drafts, values, violations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.page.drafts import (
    Draft,
    NotRepresentableError,
    draft_from_value,
    empty_draft,
    partial_value,
    read_draft,
)
from decathlon_mcp.plugins.page.forms import (
    MAX_DRAFT_FIELDS,
    draft_of,
    make_form,
    read_form,
    read_inputs,
    text_of,
)
from decathlon_mcp.plugins.page.schema import Field, Kind, form_from_schema
from decathlon_mcp.types import JsonObject


def form(required: tuple[str, ...] = (), **properties: Any) -> Field:
    definitions = properties.pop("defs", {})
    return form_from_schema(
        {"type": "object", "properties": properties, "required": list(required), "$defs": definitions}
    )


def filled(made: Field, **given: Draft) -> Draft:
    return {**empty_draft(made), **given}


def violations(made: Field, **given: Draft) -> dict[str, str]:
    return {
        ".".join(map(str, item.path)): item.message
        for item in read_draft(made, filled(made, **given)).violations
    }


def value(made: Field, **given: Draft) -> Any:
    found = read_draft(made, filled(made, **given))
    assert found.violations == ()
    return found.value


def test_required_fields_come_first_and_must_be_filled() -> None:
    made = form(("path",), lines={"type": "integer"}, path={"type": "string"})
    assert [item.name for item in made.fields] == ["path", "lines"]
    assert violations(made) == {"path": 'required (write "" for an empty text)'}
    assert value(made, path='""') == {"path": ""}


@pytest.mark.parametrize(
    ("schema", "typed", "message"),
    [
        ({"type": "integer"}, "1.5", "not a whole number"),
        ({"type": "integer", "minimum": 50}, "12", "at least 50"),
        ({"type": "number", "exclusiveMaximum": 5}, "5", "less than 5"),
        ({"type": "number"}, "NaN", "not a number"),
        ({"type": "string", "maxLength": 3}, "four", "at most 3 characters, not 4"),
        ({"type": "string", "pattern": "^[a-z]+$"}, "A", "does not match ^[a-z]+$"),
        ({"type": "object"}, "{", "not JSON: "),
        ({"type": "object"}, "[]", "[] is not of type 'object'"),
    ],
)
def test_invalid_value_is_reported_at_its_field(schema: dict[str, Any], typed: str, message: str) -> None:
    assert violations(form(it=schema), it=typed)["it"].startswith(message)


def test_enums_constants_and_booleans_become_choices() -> None:
    made = form(
        ("kind",),
        mode={"enum": ["a", "b", None]},
        every={"type": "boolean", "default": False},
        kind={"const": "line"},
        level={"anyOf": [{"const": 1, "title": "low"}, {"enum": [2, 3]}]},
    )
    choices = {item.name: item.choices for item in made.fields}
    assert choices == {
        "kind": ("line",),
        "mode": ("a", "b", None),
        "every": (True, False),
        "level": (1, 2, 3),
    }
    assert value(made) == {"kind": "line"}
    assert value(made, mode=2, every=1, level=0) == {"kind": "line", "mode": None, "every": False, "level": 1}


def test_groups_nest_and_an_untouched_group_is_not_sent() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}}
    made = form(
        ("frame",),
        frame={"type": "object", "properties": {"at": {**point, "required": ["x"]}}},
        spare={**point, "required": ["x"]},
    )
    assert value(made) == {"frame": {}}
    draft = {"x": "1", "y": ""}
    assert value(made, frame={"at": draft}) == {"frame": {"at": {"x": 1}}}
    assert violations(made, spare={"x": "", "y": "2"}) == {"spare.x": "required"}


def test_nested_lists_accept_every_allowed_cell_type() -> None:
    cell = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}]}
    made = form(rows={"type": "array", "items": {"type": "array", "items": cell}})
    typed = [["1", "true", "null", "text", '"1"', "[1]"]]
    assert value(made, rows=typed) == {"rows": [[1, True, None, "text", "1", "[1]"]]}
    assert draft_from_value(made, {"rows": [[1, True, None, "text", "1"]]}) == {"rows": [typed[0][:5]]}


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
        {"type": ["integer", "null"], "minimum": 1},
    ],
)
def test_nullable_value_is_a_field_of_its_other_type(schema: dict[str, Any]) -> None:
    made = form(limit=schema)
    assert (made.fields[0].kind, made.fields[0].nullable) == (Kind.INTEGER, True)
    assert made.fields[0].hint == "whole number, from 1, or null"
    assert value(made, limit="null") == {"limit": None}
    assert value(form(("limit",), limit=schema)) == {"limit": None}
    assert violations(made, limit="0") == {"limit": "at least 1"}


def test_union_is_chosen_then_filled_in() -> None:
    after = {"title": "After", "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    never: Any = {"title": "Never", "type": "object", "properties": {}}
    made = form(("end",), end={"anyOf": [after, never, {"type": "string", "format": "date"}]})
    (end,) = made.fields
    assert (end.kind, [item.name for item in end.options]) == (Kind.UNION, ["After", "Never", ""])
    assert violations(made) == {"end": "required"}
    assert value(made, end=(0, {"n": "3"})) == {"end": {"n": 3}}
    assert violations(made, end=(0, {"n": ""})) == {"end.n": "required"}
    assert draft_from_value(made, {"end": "2026-01-01"}) == {"end": (2, "2026-01-01")}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        {"$ref": "https://example.org/schema.json"},
        {"$ref": "#/$defs/nowhere"},
        {"type": "object", "properties": 5},
    ],
)
def test_inexpressible_schema_becomes_a_json_field(schema: Any) -> None:
    made = form(it=schema)
    assert made.fields[0].kind is Kind.JSON
    found = read_draft(made, {"it": '{"x": [1, null]}'})
    assert found.value == {"it": {"x": [1, None]}}


def test_recursive_schema_ends_in_a_json_field() -> None:
    children = {"type": "array", "items": {"$ref": "#/$defs/N"}}
    node = {"type": "object", "properties": {"name": {"type": "string"}, "children": children}}
    made = form(tree={"$ref": "#/$defs/N"}, defs={"N": node})
    inner = made.fields[0].fields[1].items
    assert inner is not None
    assert inner.kind is Kind.JSON
    assert value(made, tree={"name": "", "children": ['{"name": "leaf"}']}) == {
        "tree": {"children": [{"name": "leaf"}]}
    }
    bad = violations(made, tree={"name": "", "children": ['{"name": 1}']})
    assert bad == {"tree.children.0.name": "1 is not of type 'string'"}


def test_json_and_form_are_interchangeable() -> None:
    made = form(
        ("path",),
        path={"type": "string"},
        tags={"type": "array", "items": {"type": "string"}},
        size={"type": "object", "properties": {"w": {"type": "number"}}},
        any={},
    )
    arguments = {"path": "", "tags": ["a"], "size": {"w": 1.5}, "any": {"x": None}}
    draft = draft_from_value(made, arguments)
    assert read_draft(made, draft).value == arguments
    assert partial_value(made, {**draft, "size": {"w": "wide"}}) == {**arguments, "size": {}}
    for strange in ({"path": 5}, {"nothing": 1}, {"tags": "a"}):
        with pytest.raises(NotRepresentableError):
            draft_from_value(made, strange)


ROWS = make_form(
    json.dumps(
        {
            "type": "object",
            "properties": {
                "rows": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
            },
        }
    )
)


def inputs_of(count: int, length: int) -> dict[str, str]:
    """What a browser sends for so many rows of empty cells."""
    return {"f.0.n": str(count), **{f"f.0.{number}.n": str(length) for number in range(count)}}


def test_lists_in_lists_describe_no_more_fields_than_a_browser_can_send() -> None:
    draft: Draft = read_inputs(ROWS, inputs_of(9, 200))
    assert [len(row) for row in draft["rows"]] == [200] * 9
    with pytest.raises(BadRequestError, match="as JSON"):
        read_inputs(ROWS, inputs_of(200, 200))


def test_json_with_more_values_than_a_form_has_fields_stays_json() -> None:
    draft: Draft = draft_of(ROWS, json.dumps({"rows": [["x"] * 200] * 9}))
    assert draft["rows"] == [["x"] * 200] * 9
    problem = draft_of(ROWS, json.dumps({"rows": [["x"] * MAX_DRAFT_FIELDS]}))
    assert isinstance(problem, str)
    assert str(MAX_DRAFT_FIELDS) in problem


@pytest.mark.parametrize("property_schema", [{}, {"enum": ["\ud800"]}])
def test_arguments_with_lone_surrogates_are_json_that_can_be_sent(property_schema: JsonObject) -> None:
    properties = {"a": property_schema, "\udfff": {"type": "string"}}
    made = make_form(json.dumps({"type": "object", "properties": properties}))
    typed = '"\\ud800"' if made.fields[0].kind is Kind.JSON else "0"
    draft = read_inputs(made, {"f.0": typed, "f.1": "x"})
    reading = read_form(made, draft)
    assert reading.arguments is not None
    for text in (reading.arguments, text_of(made, draft)):
        assert json.loads(text.encode())["\udfff"] == "x"
