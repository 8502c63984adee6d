"""Text from outside in messages: names shown, shortened and compared, and problems that pydantic finds."""

from __future__ import annotations

import difflib
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from decathlon_mcp.validation import MAX_COMPARED, find_problems, quoted, similar


class Slot(BaseModel):
    model_config = ConfigDict(extra="forbid")

    values: dict[str, str] = {}


@dataclass
class Colours:
    pairs: tuple[tuple[str, int], ...] = ()


def _even(number: int) -> int:
    if number % 2:
        raise ValueError("must be even")
    return number


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
    even: Annotated[int, AfterValidator(_even)] = 0


SCHEMA = TypeAdapter(Shop)


def problems_of(value: Mapping[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as raised:
        SCHEMA.validate_python(value)
    found = find_problems(raised.value, value, SCHEMA, more_names=["colour"])
    return [f"{problem.field}: {problem.message}" for problem in found]


CASES: list[tuple[dict[str, Any], str]] = [
    ({"weigths": {"a": 1}}, "weigths: there is no such field; did you mean weights?"),
    ({"color": 1}, "color: there is no such field; did you mean colour?"),
    ({"rooms": [{}, {"valus": {}}]}, "rooms.1.valus: there is no such field; did you mean values?"),
    ({"slots": []}, "slots: must be an integer; must be an object"),
    ({"order": "frist"}, "order: must be one of 'first' or 'last'"),
    ({"size": 0}, "size: must be at least 1"),
    ({"weights": {3: 1}}, "weights.3: must be a string"),
    ({"ends": [1]}, "ends.1: is required"),
    ({"even": 1}, "even: must be even"),
]


def test_a_problem_names_its_field_and_says_what_was_expected() -> None:
    for value, problem in CASES:
        assert problems_of({"name": "x", **value}) == [problem]


def test_a_misspelt_field_comes_before_the_one_that_is_missing() -> None:
    assert problems_of({}) == ["name: is required"]
    expected = ["nmae: there is no such field; did you mean name?", "name: is required"]
    assert problems_of({"nmae": "x"}) == expected


def test_text_of_the_value_is_not_shown_because_it_may_be_a_secret() -> None:
    for field in ("size", "share", "warm", "slots", "order", "weights", "rooms", "ends"):
        assert "hunter2" not in str(problems_of({"name": "x", field: "hunter2"}))


def test_a_pair_is_named_by_its_key() -> None:
    value: dict[str, Any] = {"pairs": {"red": 1, "blue": "x"}}
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(Colours).validate_python({"pairs": tuple(value["pairs"].items())})
    assert [problem.field for problem in find_problems(raised.value, value)] == ["pairs.blue"]


def test_short_names_are_quoted_and_have_similar_ones() -> None:
    assert quoted("a'b") == '"a\'b"'
    assert similar("find-anwser", ["find-answer", "other"], count=3) == ["find-answer"]


def test_long_names_are_neither_shown_nor_compared() -> None:
    name = "n" * 60_000_000
    assert quoted(name) == "of 60,000,000 characters"
    started = time.process_time()
    assert similar(name, ["n" * 100, "n" * 300], count=3) == []
    assert similar("nnn", [name, "nnnn"], count=3) == ["nnnn"]
    assert time.process_time() - started < 1


def test_many_candidates_that_are_alike_take_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    ratio = difflib.SequenceMatcher[str].ratio

    def count(matcher: difflib.SequenceMatcher[str]) -> float:
        nonlocal compared
        compared += 1
        return ratio(matcher)

    monkeypatch.setattr(difflib.SequenceMatcher, "ratio", count)
    shuffled = random.Random(1)
    letters = "abc_" * 20
    candidates = ["".join(shuffled.sample(letters, len(letters))) for _ in range(2_000)]
    assert similar(letters, candidates, count=1, cutoff=0.2) != []
    # `difflib` asks twice for what is alike.
    assert 0 < compared <= 2 * MAX_COMPARED
