"""Problems that pydantic finds, in words for people who have never seen pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from decathlon_mcp.validation import find_problems


class Slot(BaseModel):
    model_config = ConfigDict(extra="forbid")

    values: dict[str, str] = {}


@dataclass
class Colours:
    pairs: tuple[tuple[str, int], ...] = ()


class Shop(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    weights: Annotated[dict[str, float], Field(min_length=1)] = {"a": 1}
    order: Literal["first", "last"] = "first"
    size: Annotated[int, Field(ge=1, le=65_535)] = 1
    share: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1
    warm: Literal["auto"] | Annotated[int, Field(ge=0)] = 0
    slots: Annotated[int, Field(ge=1)] | dict[str, Slot] = 1
    rooms: list[Slot] = []
    ends: tuple[int, int] = (0, 0)


SCHEMA = TypeAdapter(Shop)
FIELDS = "colour, ends, name, order, rooms, share, size, slots, warm, weights"


def problems_of(value: Mapping[str, Any], *, shows_text: bool = False) -> list[str]:
    with pytest.raises(ValidationError) as raised:
        SCHEMA.validate_python(value)
    found = find_problems(raised.value, value, SCHEMA, more_names=["colour"], shows_text=shows_text)
    return [f"{problem.field}: {problem.message}" for problem in found]


CASES: list[tuple[dict[str, Any], str]] = [
    ({"weigths": {"a": 1}}, "weigths: there is no such field; did you mean weights?"),
    ({"color": 1}, "color: there is no such field; did you mean colour?"),
    ({"zzz": 1}, f"zzz: there is no such field; the fields here are {FIELDS}"),
    ({"rooms": [{}, {"valus": {}}]}, "rooms.1.valus: there is no such field; did you mean values?"),
    ({"slots": {"a": {"valus": {}}}}, "slots.a.valus: there is no such field; did you mean values?"),
    ({"slots": "x"}, "slots: a whole number or a mapping was expected, not text"),
    ({"warm": "x"}, "warm: 'auto' or a whole number was expected, not text"),
    ({"order": "frist"}, "order: 'first' or 'last' was expected, not text; did you mean first?"),
    ({"size": 0}, "size: a number of at least 1 was expected, not 0"),
    ({"size": 70_000}, "size: a number of at most 65,535 was expected, not 70000"),
    ({"size": 1.5}, "size: a whole number was expected, not 1.5"),
    ({"share": 0}, "share: a number above 0 was expected, not 0"),
    ({"share": float("inf")}, "share: a finite number was expected, not inf"),
    ({"share": None}, "share: a number was expected, not nothing"),
    ({"weights": {}}, "weights: must not be empty"),
    ({"weights": []}, "weights: a mapping was expected, not a list"),
    ({"weights": {3: 1}}, "weights.3: text was expected as the name"),
    ({"rooms": {}}, "rooms: a list was expected, not a mapping"),
    ({"ends": [1]}, "ends.1: this entry is missing"),
]


@pytest.mark.parametrize(("value", "problem"), CASES)
def test_a_problem_names_its_field_and_what_was_expected(value: dict[str, Any], problem: str) -> None:
    assert problems_of({"name": "x", **value}) == [problem]


def test_a_missing_field_is_named_with_its_probable_misspelling() -> None:
    assert problems_of({}) == ["name: missing; it is required"]
    # The misspelt field is the problem, not the one that it should be.
    assert problems_of({"nmae": "x"}) == ["nmae: there is no such field; did you mean name?"]


def test_all_problems_are_found() -> None:
    assert len(problems_of({"name": 3, "size": "x", "zzz": 1})) == 3


def test_text_is_shown_only_if_it_cannot_be_a_secret() -> None:
    value = {"name": "x", "size": "hunter2"}
    assert problems_of(value) == ["size: a whole number was expected, not text"]
    assert problems_of(value, shows_text=True) == ["size: a whole number was expected, not 'hunter2'"]


def test_a_pair_is_named_by_its_key() -> None:
    value: dict[str, Any] = {"pairs": {"red": 1, "blue": "x"}}
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(Colours).validate_python({"pairs": tuple(value["pairs"].items())})
    assert [problem.field for problem in find_problems(raised.value, value)] == ["pairs.blue"]


def test_a_name_of_any_length_is_no_problem() -> None:
    (problem,) = problems_of({"name": "x", "x" * 100_000: 1})
    assert "there is no such field; the fields here are" in problem
