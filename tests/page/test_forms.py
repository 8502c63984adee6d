"""Forms of the page, whose schemas come from sandboxes and whose inputs from anybody who plays."""

from __future__ import annotations

import json

import pytest
from decathlon_client.forms.values import Draft

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.page.play.forms import MAX_DRAFT_FIELDS, read_inputs
from decathlon_mcp.page.play.reading import draft_of, make_form

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
