"""How metrics become one reward: names and weights, as trainers' rubrics have them.

Decided 2026-11-21: a rubric changes the reward, never `success`. That is the evaluator's exit status, which
every task of a suite has and which stays comparable between suites; a rubric that wants it weighs the
metric `success`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from decathlon_mcp.rewards.metrics import BadMetricsError

_COMPARISON = re.compile(r"([^<>=!]+?)\s*(<=|>=|==|!=|<|>)\s*(-?[0-9]+(?:\.[0-9]+)?)", re.ASCII)
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True, slots=True)
class Term:
    """What a weight is for: a metric, or a metric compared with a number (`calls < 20`)."""

    metric: str
    sign: str | None = None
    bound: float = 0.0

    @classmethod
    def read(cls, name: str) -> Term:
        """`NAME` or `NAME SIGN NUMBER`, nothing else. Raises ValueError for a comparison that is neither."""
        if not any(sign in name for sign in "<>=!"):
            return cls(name)
        found = _COMPARISON.fullmatch(name)
        if found is None:
            raise ValueError("a comparison is a metric's name, one of < <= > >= == != and a number")
        return cls(found[1], found[2], float(found[3]))

    def value(self, metrics: Mapping[str, float]) -> float:
        """The metric, or 1.0 or 0.0 for a comparison. Raises BadMetricsError where it is not there."""
        if self.metric not in metrics:
            have = ", ".join(sorted(metrics)) or "none"
            raise BadMetricsError(
                f"the rubric weighs {self.metric!r}, which is not there (there are: {have})"
            )
        number = metrics[self.metric]
        return number if self.sign is None else float(_SIGNS[self.sign](number, self.bound))


@dataclass(frozen=True, slots=True)
class Rubric:
    """Weights by metric (or comparison), and where the metrics come from.

    `function` is `evaluation/evaluator.py:evaluate`: a file of the task's folder and a function in it. A
    metric outside its range (both ends belong to it) is an error of the evaluation. `normalise` divides the
    weighted sum by the total of the weights.
    """

    weights: Mapping[str, float]
    function: str | None = None
    normalise: bool = False
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def reward(self, metrics: Mapping[str, float]) -> float:
        """The weighted sum. Raises BadMetricsError: a weighted metric is missing, one is out of range, ..."""
        for name, (low, high) in self.ranges.items():
            number = Term(name).value(metrics)
            if not low <= number <= high:
                raise BadMetricsError(f"metric {name!r} is {number:g}, outside its range {low:g} to {high:g}")
        total = sum(weight * Term.read(name).value(metrics) for name, weight in self.weights.items())
        reward = total / sum(self.weights.values()) if self.normalise else total
        if not math.isfinite(reward):
            raise BadMetricsError("the weighted sum is not a finite number")
        return reward

    def comparisons(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The comparisons that are weighed, as metrics of their own: 1.0 or 0.0."""
        terms = {name: Term.read(name) for name in self.weights}
        return {name: term.value(metrics) for name, term in terms.items() if term.sign is not None}
