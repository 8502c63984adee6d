"""Rubrics: weights that turn metrics into one reward.

A task's rubric is `evaluation/rubric.yaml` or `rubric.yaml` in its folder:

    function: evaluation/evaluator.py:evaluate      # optional: without it, only the server's own metrics
    weights: {paper_downloaded: 0.5, correct_paper: 1.0, "calls < 20": 0.1}
    normalise: false                                # optional
    ranges: {correct_paper: [0, 1]}                 # optional

`rubrics.yaml` at the checkout's root has `tasks`, a mapping of task ids to such rubrics, and `default`, the
rubric of all other tasks; both are optional. A task's own file has precedence.

Decided 2026-11-21: a rubric changes the reward, never `success`. That is the evaluator's exit code, which
every task has and which can be compared between suites; a rubric that needs it uses the metric `success`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.grading.attempt import SERVER_METRICS
from decathlon_mcp.grading.metrics import BadMetricsError, name_problem
from decathlon_mcp.grading.verdict import MAX_NUMBER, is_bounded
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
    """A weighted term: a metric, or a comparison of a metric with a number (`calls < 20`)."""

    metric: str
    sign: str | None = None
    bound: float = 0.0

    @classmethod
    def read(cls, name: str) -> Term:
        """Parse `NAME` or `NAME SIGN NUMBER`. Raises ValueError for a comparison that is not of that form."""
        if not any(sign in name for sign in "<>=!"):
            return cls(name)
        match = _COMPARISON.fullmatch(name)
        if match is None:
            raise ValueError("a comparison is a metric's name, one of < <= > >= == != and a number")
        return cls(match[1], match[2], float(match[3]))

    def value(self, metrics: Mapping[str, float]) -> float:
        """The metric's value; 1.0 or 0.0 for a comparison. Raises BadMetricsError without the metric."""
        if self.metric not in metrics:
            available = ", ".join(sorted(metrics)) or "none"
            raise BadMetricsError(
                f"the rubric has a weight for {self.metric!r}, which is no metric here (metrics: {available})"
            )
        number = metrics[self.metric]
        return number if self.sign is None else float(_SIGNS[self.sign](number, self.bound))


@dataclass(frozen=True, slots=True)
class Rubric:
    """Weights by metric or comparison, and the function that returns the metrics.

    `function` is such as `evaluation/evaluator.py:evaluate`: a file of the task's folder and a function in
    it. A metric outside its range (both ends are inside) is an error of the evaluation. `normalise` divides
    the weighted sum by the sum of the weights.
    """

    weights: Mapping[str, float]
    function: str | None = None
    normalise: bool = False
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def reward(self, metrics: Mapping[str, float]) -> float:
        """The weighted sum. Raises BadMetricsError if it, or a metric, is out of range, or one is missing."""
        for name, (low, high) in self.ranges.items():
            number = Term(name).value(metrics)
            if not low <= number <= high:
                raise BadMetricsError(f"metric {name!r} is {number:g}, outside its range {low:g} to {high:g}")
        total = sum(weight * Term.read(name).value(metrics) for name, weight in self.weights.items())
        reward = total / sum(self.weights.values()) if self.normalise else total
        if not is_bounded(reward):
            raise BadMetricsError(f"the weighted sum is {reward:g}, beyond ±{MAX_NUMBER:.0f}")
        return reward

    def comparisons(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The weighted comparisons as metrics, 1.0 or 0.0 each."""
        terms = {name: Term.read(name) for name in self.weights}
        return {name: term.value(metrics) for name, term in terms.items() if term.sign is not None}


TASK_FILES = ("evaluation/rubric.yaml", "rubric.yaml")
SUITE_FILE = "rubrics.yaml"
_FUNCTION = re.compile(r"(evaluation(?:/\w+)*/\w+\.py):([^\W\d]\w*)")


def load_rubric(suite: Suite, task: Task) -> Rubric | None:
    """The rubric of a task; None if it has none. Raises SuiteError with file, line and field."""
    folder = suite.path / task.folder
    task_files = [folder / name for name in TASK_FILES if (folder / name).is_file()]
    if len(task_files) > 1:
        raise SuiteError(
            f"{task.id} has two rubrics: {task_files[0]} and {task_files[1]}", file=str(task_files[1])
        )
    if task_files:
        file = task_files[0]
        return _rubric(validate(file, _TASK_RUBRIC, read_yaml(file)), file, folder)
    suite_file = suite.path / SUITE_FILE
    if not suite_file.is_file():
        return None
    rubrics = validate(suite_file, _SUITE_RUBRICS, read_yaml(suite_file))
    if unknown := rubrics.tasks.keys() - suite.tasks.keys():
        raise file_error(suite_file, f"there is no task {min(unknown)!r} in this suite", field="tasks")
    rubric = rubrics.tasks.get(task.id, rubrics.default)
    return None if rubric is None else _rubric(rubric, suite_file, folder)


def _name(name: str) -> str:
    if problem := name_problem(name):
        raise ValueError(problem)
    return name


def _term(name: str) -> str:
    _name(Term.read(name).metric)
    return name


def _range(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise ValueError("a range is two numbers, the lower one first")
    return ends


def _address(address: str) -> str:
    if _FUNCTION.fullmatch(address) is None:
        raise ValueError(
            "expected a file of the task's evaluation package and a function, such as "
            "evaluation/evaluator.py:evaluate"
        )
    return address


_Number: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-MAX_NUMBER, le=MAX_NUMBER)]


class _RubricFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: Annotated[dict[Annotated[str, AfterValidator(_term)], _Number], Field(min_length=1)]
    function: Annotated[str, AfterValidator(_address)] | None = None
    normalise: Annotated[bool, Field(strict=True)] = False
    ranges: dict[
        Annotated[str, AfterValidator(_name)], Annotated[tuple[_Number, _Number], AfterValidator(_range)]
    ] = {}

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [*(Term.read(name).metric for name in self.weights), *self.ranges]
        unknown = [name for name in names if name not in SERVER_METRICS]
        if self.function is None and unknown:
            available = ", ".join(SERVER_METRICS)
            raise ValueError(
                f"without `function` there is no metric {unknown[0]!r}; the server provides {available}"
            )
        if self.normalise and sum(self.weights.values()) <= 0:
            raise ValueError("with `normalise` the sum of the weights must be above 0")
        return self


class _SuiteRubrics(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: dict[str, _RubricFile] = {}
    default: _RubricFile | None = None


_TASK_RUBRIC = TypeAdapter(_RubricFile)
_SUITE_RUBRICS = TypeAdapter(_SuiteRubrics)


def _rubric(content: _RubricFile, file: Path, folder: Path) -> Rubric:
    if content.function is not None and (problem := _function_problem(content.function, folder)):
        raise file_error(file, problem, field="function")
    return Rubric(content.weights, content.function, content.normalise, content.ranges)


def _function_problem(address: str, folder: Path) -> str | None:
    # Parsed and never imported: an evaluator belongs into a sandbox.
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
    """Whether the module defines, assigns or imports the name anywhere; `import *` may bind any name."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
    return False
