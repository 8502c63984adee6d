"""Forms from JSON schemas: fields, inputs, values, and what is wrong with them."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp import cli
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.page import forms
from decathlon_mcp.plugins.page.forms import (
    MAX_ITEMS,
    MAX_SHOWN_FIELDS,
    SavedForm,
    SavedForms,
    check_size,
    fill_form,
    inputs_of,
    read_form,
    show_form,
    text_of,
)
from decathlon_mcp.plugins.page.schema import JSON_ONLY, Field, Kind, form_from_schema, make_form
from decathlon_mcp.types import JsonObject


def form(required: tuple[str, ...] = (), **properties: Any) -> Field:
    definitions = properties.pop("defs", {})
    return form_from_schema(
        {"type": "object", "properties": properties, "required": list(required), "$defs": definitions}
    )


def messages(made: Field, **typed: str) -> dict[str, str]:
    """What is wrong, by the places of the fields. `typed`: `f_0_1` is what the input `f.0.1` has."""
    found = read_form(made, {name.replace("_", "."): text for name, text in typed.items()})
    return {name.removeprefix("f."): message for name, message in found.messages.items()}


def value(made: Field, **typed: str) -> Any:
    found = read_form(made, {name.replace("_", "."): text for name, text in typed.items()})
    assert found.messages == {}
    return json.loads(found.arguments or "")


def filled(made: Field, arguments: JsonObject) -> dict[str, str]:
    inputs = fill_form(made, json.dumps(arguments))
    assert not isinstance(inputs, str)
    return inputs


def test_required_fields_come_first_and_must_be_filled() -> None:
    made = form(("path",), lines={"type": "integer"}, path={"type": "string"})
    assert [item.name for item in made.fields] == ["path", "lines"]
    assert messages(made) == {"0": 'required (write "" for an empty text)'}
    assert value(made, f_0='""') == {"path": ""}


@pytest.mark.parametrize(
    ("schema", "typed", "message"),
    [
        ({"type": "integer"}, "1.5", "not a whole number"),
        ({"type": "integer", "minimum": 50}, "12", "at least 50"),
        ({"type": "number", "exclusiveMaximum": 5}, "5", "less than 5"),
        ({"type": "number"}, "NaN", "not a number"),
        ({"type": "integer"}, "1e999", "not a whole number"),
        ({"type": "integer", "maximum": 9}, "1" + "0" * 400, "at most 9"),
        ({"type": "string", "maxLength": 3}, "four", "at most 3 characters, not 4"),
        ({"type": "string", "pattern": "^[a-z]+$"}, "A", "does not match ^[a-z]+$"),
        ({"type": "object"}, "{", "not JSON: "),
        ({"type": "object"}, "[]", "[] is not of type 'object'"),
    ],
)
def test_invalid_value_is_reported_at_its_field(schema: dict[str, Any], typed: str, message: str) -> None:
    assert messages(form(it=schema), f_0=typed)["0"].startswith(message)


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
    assert value(made, f_1="2", f_2="1", f_3="0") == {
        "kind": "line",
        "mode": None,
        "every": False,
        "level": 1,
    }


def test_groups_nest_and_an_untouched_group_is_not_sent() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}}
    made = form(
        ("frame",),
        frame={"type": "object", "properties": {"at": {**point, "required": ["x"]}}},
        spare={**point, "required": ["x"]},
    )
    assert value(made) == {"frame": {}}
    assert value(made, f_0_0_0="1") == {"frame": {"at": {"x": 1}}}
    assert messages(made, f_1_1="2") == {"1.0": "required"}


def test_nested_lists_accept_every_allowed_cell_type() -> None:
    cell = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}]}
    made = form(rows={"type": "array", "items": {"type": "array", "items": cell}})
    typed = ["1", "true", "null", "text", '"1"', "[1]"]
    cells = {f"f_0_0_{index}": text for index, text in enumerate(typed)}
    arguments = {"rows": [[1, True, None, "text", "1", "[1]"]]}
    assert value(made, f_0_n="1", f_0_0_n="6", **cells) == arguments
    assert [filled(made, arguments)[f"f.0.0.{index}"] for index in range(5)] == typed[:5]


def test_items_are_added_and_removed_by_buttons() -> None:
    made = form(rows={"type": "array", "items": {"type": "array", "items": {"type": "integer"}}})
    rows = [[0], [1, 11], [2, 22, 222], []]
    inputs = inputs_of({**filled(made, {"rows": rows}), "tool": "its tool"}, "remove:f.0:1")
    assert value(made, **inputs) == {"rows": [[0], [2, 22, 222], []]}
    inputs = inputs_of(inputs, "remove:f.0.1:0")
    assert value(made, **inputs) == {"rows": [[0], [22, 222], []]}
    inputs = inputs_of(inputs, "add:f.0.2")
    assert messages(made, **inputs) == {"0.2.0": "required"}
    for action in ("remove:f.0:3", "remove:f.0:x", "remove:f.9:0", "remove", "call"):
        assert inputs_of(inputs, action) == inputs


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
    assert value(made, f_0="null") == {"limit": None}
    assert value(form(("limit",), limit=schema)) == {"limit": None}
    assert messages(made, f_0="0") == {"0": "at least 1"}


def test_union_is_chosen_then_filled_in() -> None:
    after = {"title": "After", "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    never: Any = {"title": "Never", "type": "object", "properties": {}}
    made = form(("end",), end={"anyOf": [after, never, {"type": "string", "format": "date"}]})
    (end,) = made.fields
    assert (end.kind, [item.name for item in end.options]) == (Kind.UNION, ["After", "Never", ""])
    assert messages(made) == {"0": "required"}
    assert value(made, f_0_o="0", f_0_0_0="3") == {"end": {"n": 3}}
    assert messages(made, f_0_o="0") == {"0.0.0": "required"}
    assert filled(made, {"end": "2026-01-01"}) == {"f.0.o": "2", "f.0.2": "2026-01-01"}


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
    assert json.loads(text_of(made, {"f.0": '{"x": [1, null]}'})) == {"it": {"x": [1, None]}}


def test_recursive_schema_ends_in_a_json_field() -> None:
    children = {"type": "array", "items": {"$ref": "#/$defs/N"}}
    node = {"type": "object", "properties": {"name": {"type": "string"}, "children": children}}
    made = form(tree={"$ref": "#/$defs/N"}, defs={"N": node})
    inner = made.fields[0].fields[1].items
    assert inner is not None
    assert inner.kind is Kind.JSON
    assert value(made, f_0_1_n="1", f_0_1_0='{"name": "leaf"}') == {"tree": {"children": [{"name": "leaf"}]}}
    bad = messages(made, f_0_1_n="1", f_0_1_0='{"name": 1}')
    assert bad == {"0.1.0": "name: 1 is not of type 'string'"}


def test_json_and_form_are_interchangeable() -> None:
    made = form(
        ("path",),
        path={"type": "string"},
        tags={"type": "array", "items": {"type": "string"}},
        size={"type": "object", "properties": {"w": {"type": "number"}}},
        any={},
    )
    arguments = {"path": "", "tags": ["a"], "size": {"w": 1.5}, "any": {"x": None}}
    inputs = filled(made, arguments)
    assert value(made, **inputs) == arguments
    wide = {name: "wide" if text == "1.5" else text for name, text in inputs.items()}
    assert json.loads(text_of(made, wide)) == {**arguments, "size": {}}
    for strange in ({"path": 5}, {"nothing": 1}, {"tags": "a"}):
        assert "cannot represent" in str(fill_form(made, json.dumps(strange)))


def test_a_form_that_is_json_alone_and_empty_is_an_empty_object() -> None:
    assert text_of(JSON_ONLY, {}) == "{}"


def test_forms_that_are_kept_count_with_the_names_of_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MAX_SAVED_BYTES", 10_000)
    saved, sent = SavedForms(), {"f." + "x" * 6_000: ""}
    for tool in ("old", "new"):
        saved.save("episode", tool, SavedForm(sent), sent)
    assert [dict(saved.get("episode", tool).inputs) for tool in ("old", "new")] == [{}, sent]


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


def inputs_of_rows(count: int, length: int) -> dict[str, str]:
    """What a browser sends for so many rows of empty cells."""
    return {"f.0.n": str(count), **{f"f.0.{number}.n": str(length) for number in range(count)}}


def test_lists_in_lists_describe_no_more_fields_than_a_browser_can_send() -> None:
    inputs = inputs_of(inputs_of_rows(9, 200), "call")
    check_size(ROWS, inputs)
    (rows,) = show_form(ROWS, inputs, {}).inner
    assert [len(row.inner) for row in rows.inner] == [200] * 9
    with pytest.raises(BadRequestError, match="as JSON"):
        check_size(ROWS, inputs_of_rows(200, 200))


def test_json_with_more_values_than_a_form_has_fields_stays_json() -> None:
    assert value(ROWS, **filled(ROWS, {"rows": [["x"] * 200] * 9})) == {"rows": [["x"] * 200] * 9}
    for rows, limit in (([["x"] * 200] * 10, MAX_SHOWN_FIELDS), ([["x"] * 201], MAX_ITEMS)):
        problem = fill_form(ROWS, json.dumps({"rows": rows}))
        assert isinstance(problem, str)
        assert str(limit) in problem


@pytest.mark.parametrize("property_schema", [{}, {"enum": ["\ud800"]}])
def test_arguments_with_lone_surrogates_are_json_that_can_be_sent(property_schema: JsonObject) -> None:
    properties = {"a": property_schema, "\udfff": {"type": "string"}}
    made = make_form(json.dumps({"type": "object", "properties": properties}))
    typed = '"\\ud800"' if made.fields[0].kind is Kind.JSON else "0"
    inputs = {"f.0": typed, "f.1": "x"}
    reading = read_form(made, inputs)
    assert reading.arguments is not None
    for text in (reading.arguments, text_of(made, inputs)):
        assert json.loads(text.encode())["\udfff"] == "x"


def test_the_process_that_reads_forms_starts_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """anyio has it load the server's main module under this name: `python -m decathlon_mcp.cli serve`."""
    monkeypatch.setattr(sys, "argv", ["worker"])
    runpy.run_path(str(Path(cli.__file__).with_name("__main__.py")), run_name="__mp_main__")
