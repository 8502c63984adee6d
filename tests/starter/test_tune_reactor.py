"""tune-reactor: attempts that look like a solution but are wrong."""

from __future__ import annotations

import pytest

from tests.starter.bench import Bench

pytestmark = pytest.mark.anyio
TASK = "tune-reactor"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 62),  # faster, and too hot
        ("catalyst", 4.5),
        ("minutes", 60),
        ("product_percent", 72),  # what was asked for, not what was found
        ("peak_heat_kw", 11),
        ("peak_heat_kw", True),
        ("product_percent", "NaN"),
    ],
)
async def test_a_recipe_that_is_not_the_best_or_was_not_run_fails(
    right: Bench, field: str, value: object
) -> None:
    right.edit_json("recipe.json", **{field: value})
    right.assert_fails(field)


async def test_a_recipe_with_a_field_too_many_fails(right: Bench) -> None:
    right.edit_json("recipe.json", note="the best of all")
    right.assert_fails("no others")
