"""How metrics become one reward: names and weights, as trainers' rubrics have them.

Decided 2026-11-21: a rubric changes the reward, never `success`. That is the evaluator's exit status, which
every task of a suite has and which stays comparable between suites; a rubric that wants it weighs the
metric `success`.

Reading a rubric: `rubric.yaml` beside a task's evaluator, or `rubrics.yaml` at the checkout's root.

    function: evaluation/evaluator.py:evaluate      # optional: without it, only what the server counts
    weights: {paper_downloaded: 0.5, correct_paper: 1.0, "calls < 20": 0.1}
    normalise: false                                # optional
    ranges: {correct_paper: [0, 1]}                 # optional

`rubrics.yaml` has `tasks`, a mapping of task ids to such rubrics, and `default`, the one of all other tasks
(either may be left out). A task's own file is before the suite's.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.grading.attempt import COUNTED
from decathlon_mcp.grading.metrics import BadMetricsError, name_problem
from decathlon_mcp.suites.documents import file_error, read_yaml, validate
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task

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


TASK_FILES = ("evaluation/rubric.yaml", "rubric.yaml")
SUITE_FILE = "rubrics.yaml"
_FUNCTION = re.compile(r"(evaluation(?:/\w+)*/\w+\.py):([^\W\d]\w*)")


def load_rubric(suite: Suite, task: Task) -> Rubric | None:
    """The rubric of a task, None where it has none. Raises SuiteError naming file, line and field."""
    folder = suite.path / task.folder
    own = [folder / name for name in TASK_FILES if (folder / name).is_file()]
    if len(own) > 1:
        raise SuiteError(f"{task.id} has two rubrics: {own[0]} and {own[1]}", file=str(own[1]))
    if own:
        return _rubric(validate(own[0], _OF_TASK, read_yaml(own[0])), own[0], folder)
    for_all = suite.path / SUITE_FILE
    if not for_all.is_file():
        return None
    said = validate(for_all, _OF_SUITE, read_yaml(for_all))
    if unknown := said.tasks.keys() - suite.tasks.keys():
        raise file_error(for_all, f"there is no task {min(unknown)!r} in this suite", field="tasks")
    rubric = said.tasks.get(task.id, said.default)
    return None if rubric is None else _rubric(rubric, for_all, folder)


def _name(name: str) -> str:
    if problem := name_problem(name):
        raise ValueError(problem)
    return name


def _term(name: str) -> str:
    _name(Term.read(name).metric)
    return name


def _range(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise ValueError("a range is two numbers, the lower first")
    return ends


def _address(address: str) -> str:
    if _FUNCTION.fullmatch(address) is None:
        raise ValueError(
            "a file of the task's evaluation package and a function were expected: "
            "evaluation/evaluator.py:evaluate"
        )
    return address


_Number: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _RubricFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: Annotated[dict[Annotated[str, AfterValidator(_term)], _Number], Field(min_length=1)]
    function: Annotated[str, AfterValidator(_address)] | None = None
    normalise: Annotated[bool, Field(strict=True)] = False
    ranges: dict[
        Annotated[str, AfterValidator(_name)], Annotated[tuple[_Number, _Number], AfterValidator(_range)]
    ] = {}

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        names = [*(Term.read(name).metric for name in self.weights), *self.ranges]
        unknown = [name for name in names if name not in COUNTED]
        if self.function is None and unknown:
            counted = ", ".join(COUNTED)
            raise ValueError(
                f"without `function` there is no metric {unknown[0]!r}; the server itself knows {counted}"
            )
        if self.normalise and sum(self.weights.values()) <= 0:
            raise ValueError("with `normalise` the total of the weights must be above 0")
        return self


class _SuiteRubrics(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: dict[str, _RubricFile] = {}
    default: _RubricFile | None = None


_OF_TASK = TypeAdapter(_RubricFile)
_OF_SUITE = TypeAdapter(_SuiteRubrics)


def _rubric(said: _RubricFile, file: Path, folder: Path) -> Rubric:
    """The function's file is there and binds its name; what it returns is known only when it is called."""
    if said.function is not None and (problem := _function_problem(said.function, folder)):
        raise file_error(file, problem, field="function")
    return Rubric(said.weights, said.function, said.normalise, said.ranges)


def _function_problem(address: str, folder: Path) -> str | None:
    path, _, name = address.partition(":")
    file = folder / path
    if not file.is_file():
        return f"there is no file {file}"
    try:
        module = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        return f"{file} is not Python: {error}"
    return None if _binds(module, name) else f"{file} has no function {name!r}"


def _binds(module: ast.Module, name: str) -> bool:
    """Is the name defined, assigned or imported anywhere in the module? `import *` may bind any."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
    return False
