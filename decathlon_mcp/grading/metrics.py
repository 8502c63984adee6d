"""What a rubric's function returned, checked: it comes out of a sandbox, over a descriptor of ours."""

from __future__ import annotations

import json
import math
from typing import Any

from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.grading.attempt import COUNTED
from decathlon_mcp.types import as_object

MAX_METRICS = 200
MAX_NAME_CHARACTERS = 100


class BadMetricsError(DecathlonError):
    """The metrics cannot make a reward; the message says which one and why."""

    code = "bad_metrics"


def read_metrics(said: str | None) -> dict[str, float]:
    """The one JSON object that the harness wrote: booleans are 1.0 and 0.0, numbers are finite.

    Raises BadMetricsError for anything else, and for a name that the server counts by itself.
    """
    if not said:
        raise BadMetricsError("the rubric's function ended without returning metrics")
    try:
        values = as_object(json.loads(said))
    except (ValueError, RecursionError):
        raise BadMetricsError("what came back over the metrics' channel is not one JSON value") from None
    if values is None:
        raise BadMetricsError("the rubric's function did not return a dict")
    if len(values) > MAX_METRICS:
        raise BadMetricsError(f"the rubric's function returned {len(values)} metrics, {MAX_METRICS} at most")
    return {_name(name): _number(name, value) for name, value in values.items()}


def name_problem(name: str) -> str | None:
    """Why `name` cannot be a metric's; None where it can."""
    if not name or name != name.strip() or not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
        return f"a metric's name is 1 to {MAX_NAME_CHARACTERS} printable characters"
    if any(sign in name for sign in "<>=!"):
        return "a metric's name has none of < > = !"
    return None


def _name(name: str) -> str:
    if problem := name_problem(name):
        raise BadMetricsError(f"metric {name[:MAX_NAME_CHARACTERS]!r}: {problem}")
    if name in COUNTED:
        raise BadMetricsError(f"metric {name!r} is one that the server counts by itself: call it otherwise")
    return name


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool):
        return 1.0 if value else 0.0
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise BadMetricsError(f"metric {name!r} is {_shown(value)}, not a finite number or a boolean")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    said = json.dumps(value, ensure_ascii=False)
    return said if len(said) <= 60 else f"{said[:60]}…"
