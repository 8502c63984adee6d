"""Forms of JSON schemas: what each construct becomes, how it reads, what is said of what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
from decathlon_client.player.draft import Draft, UnfitError, best_effort, blank, draft_of, each_field, read
from decathlon_client.player.field import Field, Kind, form_of


def form(required: tuple[str, ...] = (), **properties: Any) -> Field:
    definitions = properties.pop("defs", {})
    return form_of(
        {"type": "object", "properties": properties, "required": list(required), "$defs": definitions}
    )


def filled(made: Field, **given: Draft) -> Draft:
    return {**blank(made), **given}


def faults(made: Field, **given: Draft) -> dict[str, str]:
    return {".".join(map(str, each.path)): each.message for each in read(made, filled(made, **given)).faults}


def value(made: Field, **given: Draft) -> Any:
    found = read(made, filled(made, **given))
    assert found.faults == ()
    return found.value


def test_required_fields_come_first_and_are_missed() -> None:
    made = form(("path",), lines={"type": "integer"}, path={"type": "string"})
    assert [each.name for each in made.fields] == ["path", "lines"]
    assert faults(made) == {"path": 'required (for an empty text write "")'}
    assert value(made, path='""') == {"path": ""}


def test_what_is_left_empty_is_not_sent_and_its_default_is_told() -> None:
    made = form(depth={"type": "integer", "default": 3, "minimum": 1, "maximum": 10})
    assert (made.fields[0].default, made.fields[0].hint) == (3, "whole number, 1 to 10")
    assert value(made) == {}
    assert value(made, depth="7") == {"depth": 7}


def test_a_default_of_what_is_required_is_sent() -> None:
    assert value(form(("unit",), unit={"type": "string", "default": "g"})) == {"unit": "g"}


@pytest.mark.parametrize(
    ("schema", "typed", "said"),
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
def test_what_does_not_fit_is_said_at_its_field(schema: dict[str, Any], typed: str, said: str) -> None:
    assert faults(form(it=schema), it=typed)["it"].startswith(said)


def test_enums_constants_and_booleans_are_choices() -> None:
    made = form(
        ("kind",),
        mode={"enum": ["a", "b", None]},
        every={"type": "boolean", "default": False},
        kind={"const": "line"},
        level={"anyOf": [{"const": 1, "title": "low"}, {"enum": [2, 3]}]},
    )
    choices = {each.name: each.choices for each in made.fields}
    assert choices == {
        "kind": ("line",),
        "mode": ("a", "b", None),
        "every": (True, False),
        "level": (1, 2, 3),
    }
    assert value(made) == {"kind": "line"}
    assert value(made, mode=2, every=1, level=0) == {"kind": "line", "mode": None, "every": False, "level": 1}


def test_groups_hold_groups_and_one_that_nothing_was_filled_into_is_not_sent() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}}
    made = form(
        ("frame",),
        frame={"type": "object", "properties": {"at": {**point, "required": ["x"]}}},
        spare={**point, "required": ["x"]},
    )
    assert value(made) == {"frame": {}}
    draft = {"x": "1", "y": ""}
    assert value(made, frame={"at": draft}) == {"frame": {"at": {"x": 1}}}
    assert faults(made, spare={"x": "", "y": "2"}) == {"spare.x": "required"}


def test_a_list_has_as_many_fields_as_were_added() -> None:
    made = form(("names",), names={"type": "array", "items": {"type": "string"}, "minItems": 1})
    assert made.fields[0].hint == "list of text"
    assert faults(made) == {"names": "at least 1 in the list"}
    assert value(made, names=["a", "b"]) == {"names": ["a", "b"]}
    assert "names.1" in faults(made, names=["a", ""])


def test_a_list_of_lists_of_cells_takes_what_a_cell_may_be() -> None:
    cell = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}]}
    made = form(rows={"type": "array", "items": {"type": "array", "items": cell}})
    typed = [["1", "true", "null", "text", '"1"', "[1]"]]
    assert value(made, rows=typed) == {"rows": [[1, True, None, "text", "1", "[1]"]]}
    assert draft_of(made, {"rows": [[1, True, None, "text", "1"]]}) == {"rows": [typed[0][:5]]}


def test_references_are_followed_and_words_beside_them_count() -> None:
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
def test_what_may_be_null_is_a_field_of_what_else_it_is(schema: dict[str, Any]) -> None:
    made = form(limit=schema)
    assert (made.fields[0].kind, made.fields[0].nullable) == (Kind.INTEGER, True)
    assert made.fields[0].hint == "whole number, from 1, or null"
    assert value(made, limit="null") == {"limit": None}
    assert value(form(("limit",), limit=schema)) == {"limit": None}
    assert faults(made, limit="0") == {"limit": "at least 1"}


def test_one_of_several_is_chosen_and_then_filled_in() -> None:
    after = {"title": "After", "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    never: Any = {"title": "Never", "type": "object", "properties": {}}
    made = form(("end",), end={"anyOf": [after, never, {"type": "string", "format": "date"}]})
    (end,) = made.fields
    assert (end.kind, [each.name for each in end.options]) == (Kind.UNION, ["After", "Never", ""])
    assert faults(made) == {"end": "required"}
    assert value(made, end=(0, {"n": "3"})) == {"end": {"n": 3}}
    assert faults(made, end=(0, {"n": ""})) == {"end.n": "required"}
    assert draft_of(made, {"end": "2026-01-01"}) == {"end": (2, "2026-01-01")}


def test_all_of_several_are_one_group() -> None:
    made = form_of(
        {
            "allOf": [
                {"properties": {"a": {"type": "string"}}, "required": ["a"]},
                {"properties": {"b": {"type": "string"}}, "required": ["b"]},
            ]
        }
    )
    assert [(each.name, each.required) for each in made.fields] == [("a", True), ("b", True)]


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
def test_what_no_field_fits_is_written_as_json(schema: Any) -> None:
    made = form(it=schema)
    assert made.fields[0].kind is Kind.JSON
    found = read(made, {"it": '{"x": [1, null]}'})
    assert found.value == {"it": {"x": [1, None]}}


def test_a_schema_that_holds_itself_ends_in_json() -> None:
    children = {"type": "array", "items": {"$ref": "#/$defs/N"}}
    node = {"type": "object", "properties": {"name": {"type": "string"}, "children": children}}
    made = form(tree={"$ref": "#/$defs/N"}, defs={"N": node})
    inner = made.fields[0].fields[1].items
    assert inner is not None
    assert inner.kind is Kind.JSON
    assert value(made, tree={"name": "", "children": ['{"name": "leaf"}']}) == {
        "tree": {"children": [{"name": "leaf"}]}
    }
    bad = faults(made, tree={"name": "", "children": ['{"name": 1}']})
    assert bad == {"tree.children.0.name": "1 is not of type 'string'"}


def test_arguments_that_are_no_group_are_json_as_a_whole() -> None:
    made = form_of(
        {"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]}
    )
    assert made.kind is Kind.JSON


def test_what_mostly_has_several_lines_gets_an_editor() -> None:
    made = form(
        sql={"type": "string"},
        new_text={"type": "string"},
        path={"type": "string"},
        title={"type": "string", "maxLength": 40},
        note={"type": "string", "maxLength": 4000},
    )
    assert [each.name for each in made.fields if each.kind is Kind.LONG_TEXT] == ["sql", "new_text", "note"]


def test_rules_between_fields_are_said_where_they_can_be() -> None:
    made = form_of(
        {
            "type": "object",
            "properties": {"from": {"type": "string"}, "to": {"type": "string"}},
            "dependentRequired": {"from": ["to"]},
        }
    )
    assert [each.path for each in read(made, {"from": "a", "to": ""}).faults] == [()]


@pytest.mark.parametrize(
    "schema",
    [{"type": "string", "pattern": "("}, {"type": "integer", "minimum": "one"}],
)
def test_a_schema_that_is_wrong_itself_leaves_the_judgement_to_the_tool(schema: dict[str, Any]) -> None:
    assert read(form(it=schema), {"it": "5"}).faults == ()


def test_json_and_form_are_two_ways_to_write_the_same() -> None:
    made = form(
        ("path",),
        path={"type": "string"},
        tags={"type": "array", "items": {"type": "string"}},
        size={"type": "object", "properties": {"w": {"type": "number"}}},
        any={},
    )
    arguments = {"path": "", "tags": ["a"], "size": {"w": 1.5}, "any": {"x": None}}
    draft = draft_of(made, arguments)
    assert read(made, draft).value == arguments
    assert best_effort(made, {**draft, "size": {"w": "wide"}}) == {**arguments, "size": {}}
    for strange in ({"path": 5}, {"nothing": 1}, {"tags": "a"}):
        with pytest.raises(UnfitError):
            draft_of(made, strange)


def test_every_field_that_is_shown_has_a_path() -> None:
    made = form(a={"type": "array", "items": {"type": "object", "properties": {"b": {"type": "string"}}}})
    paths = [path for path, _ in each_field(made, {"a": [{"b": ""}, {"b": "x"}]})]
    assert paths == [(), ("a",), ("a", 0), ("a", 0, "b"), ("a", 1), ("a", 1, "b")]
