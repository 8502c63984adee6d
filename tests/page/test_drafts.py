"""Forms from JSON schemas: fields, drafts, values, violations."""

from __future__ import annotations

from typing import Any

import pytest

from decathlon_mcp.plugins.page.drafts import (
    Draft,
    NotRepresentableError,
    draft_from_value,
    empty_draft,
    partial_value,
    read_draft,
)
from decathlon_mcp.plugins.page.schema import Field, Kind, form_from_schema


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


def test_empty_fields_are_not_sent_and_show_their_default() -> None:
    made = form(depth={"type": "integer", "default": 3, "minimum": 1, "maximum": 10})
    assert (made.fields[0].default, made.fields[0].hint) == (3, "whole number, 1 to 10")
    assert value(made) == {}
    assert value(made, depth="7") == {"depth": 7}


def test_default_of_a_required_field_is_sent() -> None:
    assert value(form(("unit",), unit={"type": "string", "default": "g"})) == {"unit": "g"}


@pytest.mark.parametrize(
    ("schema", "typed", "message"),
    [
        ({"type": "integer"}, "1.5", "not a whole number"),
        ({"type": "integer"}, "true", "not a whole number"),
        ({"type": "integer", "minimum": 50}, "12", "at least 50"),
        ({"type": "number", "exclusiveMaximum": 5}, "5", "less than 5"),
        ({"type": "number", "multipleOf": 0.5}, "1.3", "a multiple of 0.5"),
        ({"type": "number"}, "NaN", "not a number"),
        ({"type": "string", "minLength": 1}, '""', "must not be empty"),
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


def test_list_has_one_field_per_added_item() -> None:
    made = form(("names",), names={"type": "array", "items": {"type": "string"}, "minItems": 1})
    assert made.fields[0].hint == "list of text"
    assert violations(made) == {"names": "at least 1 in the list"}
    assert value(made, names=["a", "b"]) == {"names": ["a", "b"]}
    assert "names.1" in violations(made, names=["a", ""])


def test_nested_lists_accept_every_allowed_cell_type() -> None:
    cell = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}]}
    made = form(rows={"type": "array", "items": {"type": "array", "items": cell}})
    typed = [["1", "true", "null", "text", '"1"', "[1]"]]
    assert value(made, rows=typed) == {"rows": [[1, True, None, "text", "1", "[1]"]]}
    assert draft_from_value(made, {"rows": [[1, True, None, "text", "1"]]}) == {"rows": [typed[0][:5]]}


def test_references_are_resolved_and_sibling_keywords_apply() -> None:
    made = form(
        to={"$ref": "#/$defs/Place", "description": "Where to."},
        defs={
            "Place": {
                "type": "object",
                "description": "A.",
                "properties": {"city": {"$ref": "#/$defs/City"}},
            },
            "City": {"enum": ["Bonn", "Ulm"]},
        },
    )
    (to,) = made.fields
    assert (to.kind, to.description, to.fields[0].choices) == (Kind.OBJECT, "Where to.", ("Bonn", "Ulm"))
    assert value(made, to={"city": 1}) == {"to": {"city": "Ulm"}}


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
        {"oneOf": [{"type": "null"}, {"type": "integer", "minimum": 1}]},
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


def test_all_of_is_merged_into_one_group() -> None:
    made = form_from_schema(
        {
            "allOf": [
                {"properties": {"a": {"type": "string"}}, "required": ["a"]},
                {"properties": {"b": {"type": "string"}}, "required": ["b"]},
            ]
        }
    )
    assert [(item.name, item.required) for item in made.fields] == [("a", True), ("b", True)]


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": "object", "additionalProperties": {"type": "number"}},
        {"type": "array"},
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


def test_arguments_that_are_not_an_object_are_one_json_field() -> None:
    made = form_from_schema(
        {"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]}
    )
    assert made.kind is Kind.JSON


def test_long_text_fields_get_a_multi_line_input() -> None:
    made = form(
        sql={"type": "string"},
        new_text={"type": "string"},
        path={"type": "string"},
        title={"type": "string", "maxLength": 40},
        note={"type": "string", "maxLength": 4000},
    )
    assert [item.name for item in made.fields if item.kind is Kind.LONG_TEXT] == ["sql", "new_text", "note"]


def test_rules_between_fields_are_reported() -> None:
    made = form_from_schema(
        {
            "type": "object",
            "properties": {"from": {"type": "string"}, "to": {"type": "string"}},
            "dependentRequired": {"from": ["to"]},
        }
    )
    assert [item.path for item in read_draft(made, {"from": "a", "to": ""}).violations] == [()]


@pytest.mark.parametrize(
    "schema",
    [{"type": "string", "pattern": "("}, {"type": "integer", "minimum": "one"}],
)
def test_invalid_schema_reports_nothing(schema: dict[str, Any]) -> None:
    assert read_draft(form(it=schema), {"it": "5"}).violations == ()


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
