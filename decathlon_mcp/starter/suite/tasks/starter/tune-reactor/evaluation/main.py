"""Checks for the best recipe, with figures that an agent can only know from its simulation."""

import json

from utils.evaluation import Attempt, judge, require
from utils.submission import close, read_object


def check(attempt: Attempt) -> None:
    best = json.loads((attempt.groundtruth / "recipe.json").read_text())
    recipe = read_object(attempt.workspace, "recipe.json", set(best))
    for name in ("catalyst", "temperature", "minutes"):
        require(close(recipe[name], best[name], 0), f"a better recipe has another {name}")
    require(
        close(recipe["product_percent"], best["product_percent"], 0.011),
        "product_percent is not what that recipe gives",
    )
    require(
        close(recipe["peak_heat_kw"], best["peak_heat_kw"], 0.0011),
        "peak_heat_kw is not what that recipe gives",
    )


if __name__ == "__main__":
    judge(check)
