"""Forms of the page, whose schemas come from sandboxes and whose inputs from anybody who plays."""

from __future__ import annotations

import json

import pytest

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.page.drafts import Draft
from decathlon_mcp.plugins.page.forms import (
    MAX_DRAFT_FIELDS,
    draft_of,
    make_form,
    read_form,
    read_inputs,
    text_of,
)
from decathlon_mcp.plugins.page.schema import Kind
from decathlon_mcp.types import JsonObject

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


def rows(count: int, length: int) -> dict[str, str]:
    """What a browser sends for so many rows of empty cells."""
    return {"f.0.n": str(count), **{f"f.0.{number}.n": str(length) for number in range(count)}}


def test_lists_in_lists_describe_no_more_fields_than_a_browser_can_send() -> None:
    draft: Draft = read_inputs(ROWS, rows(9, 200))
    assert [len(row) for row in draft["rows"]] == [200] * 9
    with pytest.raises(BadRequestError, match="as JSON"):
        read_inputs(ROWS, rows(200, 200))


def test_json_with_more_values_than_a_form_has_fields_stays_json() -> None:
    draft: Draft = draft_of(ROWS, json.dumps({"rows": [["x"] * 200] * 9}))
    assert draft["rows"] == [["x"] * 200] * 9
    problem = draft_of(ROWS, json.dumps({"rows": [["x"] * MAX_DRAFT_FIELDS]}))
    assert isinstance(problem, str)
    assert str(MAX_DRAFT_FIELDS) in problem


@pytest.mark.parametrize("property_schema", [{}, {"enum": ["\ud800"]}])
def test_arguments_with_lone_surrogates_are_json_that_can_be_sent(property_schema: JsonObject) -> None:
    properties = {"a": property_schema, "\udfff": {"type": "string"}}
    form = make_form(json.dumps({"type": "object", "properties": properties}))
    typed = '"\\ud800"' if form.fields[0].kind is Kind.JSON else "0"
    draft = read_inputs(form, {"f.0": typed, "f.1": "x"})
    reading = read_form(form, draft)
    assert reading.arguments is not None
    for text in (reading.arguments, text_of(form, draft)):
        assert json.loads(text.encode())["\udfff"] == "x"
