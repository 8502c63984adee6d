"""Validation of the metrics that a rubric's function returns; they come out of a sandbox."""

from __future__ import annotations

import json
import math
from typing import Any

from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.grading.attempt import SERVER_METRICS, is_tool_metric
from decathlon_mcp.grading.verdict import MAX_NUMBER
from decathlon_mcp.types import as_object

MAX_METRICS = 200
MAX_NAME_CHARACTERS = 100


class BadMetricsError(DecathlonError):
    """A reward cannot be computed from the metrics; the message names the metric and the reason."""

    code = "bad_metrics"


def read_metrics(text: str | None) -> dict[str, float]:
    """Parse the JSON object that the harness wrote; booleans become 1.0 and 0.0.

    Raises BadMetricsError for anything but an object of booleans and numbers up to `MAX_NUMBER`, and for the
    name of a metric that the server counts, except `success`.
    """
    if not text:
        raise BadMetricsError("the rubric's function ended without returning metrics")
    try:
        values = as_object(json.loads(text))
    except (ValueError, RecursionError):
        raise BadMetricsError("the output of the rubric's function is not one JSON value") from None
    if values is None:
        raise BadMetricsError("the rubric's function did not return a dict")
    if len(values) > MAX_METRICS:
        raise BadMetricsError(f"the rubric's function returned {len(values)} metrics, {MAX_METRICS} at most")
    return {_name(name): _number(name, value) for name, value in values.items()}


def name_problem(name: str) -> str | None:
    """The reason why `name` cannot name a metric; None if it can."""
    if not name or name != name.strip() or not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
        return f"a metric's name has 1 to {MAX_NAME_CHARACTERS} printable characters"
    if any(sign in name for sign in "<>=!"):
        return "a metric's name has none of the characters < > = !"
    return None


def _name(name: str) -> str:
    if problem := name_problem(name):
        raise BadMetricsError(f"metric {name[:MAX_NAME_CHARACTERS]!r}: {problem}")
    if (name in SERVER_METRICS and name != "success") or is_tool_metric(name):
        raise BadMetricsError(
            f"metric {name!r} is a metric that the server itself provides: choose another name"
        )
    return name


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool):
        return 1.0 if value else 0.0
    if isinstance(value, int | float):
        if abs(value) <= MAX_NUMBER:  # before the conversion, which raises OverflowError for large integers
            return float(value)
        if isinstance(value, int) or math.isfinite(value):
            raise BadMetricsError(f"metric {name!r} is {_shown(value)}, beyond ±{MAX_NUMBER:.0f}")
    raise BadMetricsError(f"metric {name!r} is {_shown(value)}, not a finite number or a boolean")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"
