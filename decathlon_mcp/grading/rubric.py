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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.foreign_names import quoted, similar
from decathlon_mcp.grading.attempt import SERVER_METRICS
from decathlon_mcp.grading.metrics import BadMetricsError, name_problem
from decathlon_mcp.grading.verdict import MAX_NUMBER, is_bounded
from decathlon_mcp.suites.documents import field_error, read_yaml, validate
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
FUNCTION_ARGUMENTS = (
    *("workspace", "agent_workspace", "groundtruth", "groundtruth_workspace"),
    *("log", "res_log_file", "launch_time"),
)
"""The parameters that a rubric's function may have."""
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
        return _rubric(validate(file, _TASK_RUBRIC, read_yaml(file)), file, (), folder)
    suite_file = suite.path / SUITE_FILE
    if not suite_file.is_file():
        return None
    rubrics = validate(suite_file, _SUITE_RUBRICS, read_yaml(suite_file))
    if unknown := rubrics.tasks.keys() - suite.tasks.keys():
        name = min(unknown)
        close = similar(name, suite.tasks, count=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        problem = f"there is no task {quoted(name)} in this suite{hint}"
        raise field_error(suite_file, ("tasks", name), problem)
    place = ("tasks", task.id) if task.id in rubrics.tasks else ("default",)
    rubric = rubrics.tasks.get(task.id, rubrics.default)
    return None if rubric is None else _rubric(rubric, suite_file, place, folder)


def function_location(task: Task, address: str) -> tuple[str, str]:
    """The module and the name of a rubric's function, such as `evaluation/evaluator.py:evaluate`."""
    file, _, function = address.partition(":")
    return ".".join((*task.folder.parts, *PurePosixPath(file).with_suffix("").parts)), function


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


def _rubric(content: _RubricFile, file: Path, place: Sequence[str], folder: Path) -> Rubric:
    """The rubric in a file, at the key `place`; `folder` is that of the task."""
    if content.function is not None:
        path, _, name = content.function.partition(":")
        try:
            module = _parse(folder / path)
            returned = _returned_metrics(module, name)
        except ValueError as error:
            raise field_error(file, (*place, "function"), str(error)) from None
        if returned is not None:
            if reserved := sorted(set(SERVER_METRICS).intersection(returned)):
                # Refused at each grading: `success` could contradict the evaluator's exit code.
                problem = f"{name} returns {reserved[0]!r}, which the server provides: choose another name"
                raise field_error(file, (*place, "function"), problem)
            _check_metrics(content, returned, file, place)
    return Rubric(content.weights, content.function, content.normalise, content.ranges)


def _check_metrics(content: _RubricFile, returned: Collection[str], file: Path, place: Sequence[str]) -> None:
    """Raise SuiteError for a weight or a range whose metric the function never returns."""
    available = [*sorted(returned), *SERVER_METRICS]
    for part, keys in (("weights", content.weights), ("ranges", content.ranges)):
        for key in keys:
            metric = Term.read(key).metric
            if metric in available:
                continue
            close = similar(metric, available, count=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise field_error(
                file,
                (*place, part, key),
                f"{content.function} returns no metric {metric!r}{hint} (it returns "
                f"{', '.join(sorted(returned)) or 'none'}; the server adds {', '.join(SERVER_METRICS)})",
            )


def _parse(file: Path) -> ast.Module:
    # Parsed and never imported: an evaluator belongs into a sandbox.
    try:
        return ast.parse(file.read_bytes(), str(file))
    except FileNotFoundError:
        raise ValueError(f"there is no file {file}") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except SyntaxError as error:
        raise ValueError(f"{file} is not Python: line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not Python: {error}") from None


def _returned_metrics(module: ast.Module, name: str) -> frozenset[str] | None:
    """The names of the metrics that the function can return; None if that depends on more than its text.

    Known are functions whose every `return` has a dict with literal keys. Raises ValueError if the module
    does not bind the name.
    """
    bound = _bound_names(module)
    if name not in bound:
        if "*" in bound:
            return None
        close = similar(name, bound, count=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"it has no function {name!r}{hint}")
    definitions = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    functions = [node for node in definitions if node.name == name and not node.decorator_list]
    if len(functions) != 1 or list(_bindings(module)).count(name) != 1:
        return None
    names: set[str] = set()
    returns = False
    for node in _own_nodes(functions[0]):
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return None
        if isinstance(node, ast.Return):
            returns = True
            keys = _literal_keys(node.value)
            if keys is None:
                return None
            names |= keys
    return frozenset(names) if returns else None


def _literal_keys(value: ast.expr | None) -> set[str] | None:
    if not isinstance(value, ast.Dict):
        return None
    keys = [key.value if isinstance(key, ast.Constant) else None for key in value.keys]
    names = {key for key in keys if isinstance(key, str)}
    return names if len(names) == len(set(keys)) else None


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions and classes inside of it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _own_nodes(node)


def _bound_names(module: ast.Module) -> frozenset[str]:
    return frozenset(_bindings(module))


def _bindings(module: ast.Module) -> Iterator[str]:
    """The names that the module defines, assigns or imports anywhere; `*` may be any name."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
