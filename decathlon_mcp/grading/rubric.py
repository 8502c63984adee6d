"""Rubrics: weights that turn metrics into one reward.

A task's rubric is `evaluation/rubric.yaml` or `rubric.yaml` in its folder:

    function: evaluation/evaluator.py:evaluate      # optional: without it, the function `evaluate`, if any
    weights: {paper_downloaded: 0.5, correct_paper: 1.0, "calls < 20": 0.1}
    normalise: false                                # optional
    ranges: {correct_paper: [0, 1]}                 # optional

`rubrics.yaml` at the checkout's root has `tasks`, a mapping of task ids to such rubrics, and `default`, the
rubric of all other tasks; both are optional. A task's own file has precedence.

A task without a rubric file has a rubric without weights if its evaluator has a function `evaluate`
(`evaluator_source.py`): the function's dict gives the metrics, and the reward is `success`.

Decided 2026-11-21: a rubric changes the reward, never `success`. That is the evaluator's exit code, which
can be compared between suites; a rubric that needs it uses the metric `success`.

Decided 2026-11-28: an evaluator that does nothing when it is run exits with 0 whatever the agent did. With a
function, `success` is then the metric of that name, or that all metrics are at least 1.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.errors import DecathlonError, SuiteError
from decathlon_mcp.grading.attempt import SERVER_METRICS, TOOL_METRICS, is_tool_metric
from decathlon_mcp.grading.evaluator_source import (
    FoundFunction,
    does_something,
    find_function,
    parse,
    returned_metrics,
)
from decathlon_mcp.grading.verdict import MAX_NUMBER, is_bounded
from decathlon_mcp.suites.documents import field_error, file_error, read_yaml, validate
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import as_object
from decathlon_mcp.validation import did_you_mean, quoted

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
    return {_returned_name(name): _number(name, value) for name, value in values.items()}


def name_problem(name: str) -> str | None:
    """The reason why `name` cannot name a metric; None if it can."""
    if not name or name != name.strip() or not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
        return f"a metric's name has 1 to {MAX_NAME_CHARACTERS} printable characters"
    if any(sign in name for sign in "<>=!"):
        return "a metric's name has none of the characters < > = !"
    return None


def _returned_name(name: str) -> str:
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
        if self.metric not in metrics and not is_tool_metric(self.metric):
            available = ", ".join(sorted(metrics)) or "none"
            raise BadMetricsError(
                f"the rubric has a weight for {self.metric!r}, which is no metric here (metrics: {available})"
            )
        number = metrics.get(self.metric, 0.0)
        return number if self.sign is None else float(_SIGNS[self.sign](number, self.bound))


@dataclass(frozen=True, slots=True)
class Rubric:
    """Weights by metric or comparison, and the function that returns the metrics."""

    weights: Mapping[str, float]
    """Empty: the reward is the metric `success`."""
    function: str | None = None
    """A file of the task's folder and a function in it, such as `evaluation/evaluator.py:evaluate`."""
    normalise: bool = False
    """Divide the weighted sum by the sum of the weights."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """A metric outside its range (both ends are inside) is an error of the evaluation."""
    returned: frozenset[str] | None = frozenset()
    """The metrics that the function returns; None if its text does not show them."""
    by_name: bool = False
    """The function was found by its name; no file names it."""
    decides: bool = False
    """The function decides about `success`: the evaluator does nothing when it is run."""

    @property
    def metrics(self) -> list[str] | None:
        """The names of a verdict's metrics without the server's own counts; None if unknown."""
        if self.returned is None:
            return None
        tools = TOOL_METRICS if self.by_name else ()
        names = dict.fromkeys((*sorted(self.returned), *self.weights, *tools))
        return [name for name in names if name not in SERVER_METRICS]

    @property
    def counts_tools(self) -> bool:
        """Whether a verdict has metrics of single tools."""
        return self.by_name or bool(self._weighed_tools)

    @property
    def _weighed_tools(self) -> list[str]:
        names = (Term.read(name).metric for name in (*self.weights, *self.ranges))
        return [name for name in names if is_tool_metric(name)]

    def tool_metrics(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Metrics of single tools for a verdict: with a weight; all, if the function was found by name."""
        weighed = {name: counts.get(name, 0.0) for name in self._weighed_tools}
        return {**counts, **weighed} if self.by_name else weighed

    def reward(self, metrics: Mapping[str, float]) -> float:
        """The weighted sum. Raises BadMetricsError if it, or a metric, is out of range, or one is missing."""
        if not self.weights:
            return metrics["success"]
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
    *("log", "res_log_file", "launch_time", "tool_calls"),
)
"""The parameters that a rubric's function may have."""
_FUNCTION = re.compile(r"(evaluation(?:/\w+)*/\w+\.py):([^\W\d]\w*)")


def load_rubric(suite: Suite, task: Task) -> Rubric | None:
    """The rubric of a task; None if neither a file nor a function `evaluate` gives it one.

    Raises SuiteError with file, line and field.
    """
    folder = suite.path / task.folder
    evaluator = f"{task.files.evaluation.replace('.', '/')}.py"
    content, file, place = _read_rubric(suite, task)
    found = None
    if content is None or content.function is None:
        found = find_function(folder, evaluator, FUNCTION_ARGUMENTS)
        if isinstance(found, str):
            if not does_something(folder / evaluator):
                raise file_error(folder, f"the evaluator does nothing when it is run, and {found}")
            found = None
    rubric = Rubric({}) if content is None else _rubric(content, found, file, place, folder)
    if found is not None:
        rubric = replace(rubric, function=found.address, returned=found.metrics, by_name=True)
    if rubric.function is not None and not does_something(folder / evaluator):
        rubric = replace(rubric, decides=True)
    return None if content is None and found is None else rubric


def _read_rubric(suite: Suite, task: Task) -> tuple[_RubricFile | None, Path, Sequence[str]]:
    """The task's rubric as it is written, its file, and the key there at which it is."""
    folder = suite.path / task.folder
    task_files = [folder / name for name in TASK_FILES if (folder / name).is_file()]
    if len(task_files) > 1:
        raise SuiteError(
            f"{task.id} has two rubrics: {task_files[0]} and {task_files[1]}", file=str(task_files[1])
        )
    if task_files:
        file = task_files[0]
        return validate(file, _TASK_RUBRIC, read_yaml(file)), file, ()
    suite_file = suite.path / SUITE_FILE
    try:
        status = suite_file.stat()
    except OSError:
        return None, suite_file, ()
    rubrics = _suite_rubrics(suite_file, status.st_mtime_ns, status.st_size)
    if unknown := rubrics.tasks.keys() - suite.tasks.keys():
        name = min(unknown)
        problem = f"there is no task {quoted(name)} in this suite{did_you_mean(name, suite.tasks)}"
        raise field_error(suite_file, ("tasks", name), problem)
    place = ("tasks", task.id) if task.id in rubrics.tasks else ("default",)
    return rubrics.tasks.get(task.id, rubrics.default), suite_file, place


@lru_cache(maxsize=16)
def _suite_rubrics(file: Path, _modified_ns: int, _size_bytes: int) -> _SuiteRubrics:
    # Every task of a suite asks for it.
    return validate(file, _SUITE_RUBRICS, read_yaml(file))


def metrics_of(catalogue: Catalogue, names: Iterable[str]) -> dict[str, list[str] | None]:
    """The metrics of each task without the server's own counts. Blocks: the function reads files.

    None for a task whose metrics its evaluator's text does not show, or whose rubric is broken.
    """
    found: dict[str, list[str] | None] = {}
    for name in dict.fromkeys(names):
        try:
            rubric = load_rubric(*catalogue.entry(name))
        except SuiteError:
            found[name] = None
        else:
            found[name] = [] if rubric is None else rubric.metrics
    return found


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
    def _check_weights(self) -> Self:
        if self.normalise and sum(self.weights.values()) <= 0:
            raise ValueError("with `normalise` the sum of the weights must be above 0")
        return self


class _SuiteRubrics(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: dict[str, _RubricFile] = {}
    default: _RubricFile | None = None


_TASK_RUBRIC = TypeAdapter(_RubricFile)
_SUITE_RUBRICS = TypeAdapter(_SuiteRubrics)


def _rubric(
    content: _RubricFile, found: FoundFunction | None, file: Path, place: Sequence[str], folder: Path
) -> Rubric:
    """The rubric in a file, at the key `place`; `folder` is the task's, `found` its function `evaluate`."""
    returned = frozenset[str]() if found is None else found.metrics
    if content.function is not None:
        path, _, name = content.function.partition(":")
        try:
            returned = returned_metrics(parse(folder / path), name)
        except ValueError as error:
            raise field_error(file, (*place, "function"), str(error)) from None
    if returned is not None:
        if reserved := sorted(set(SERVER_METRICS).intersection(returned) - {"success"}):
            problem = f"the function returns {reserved[0]!r}, which the server provides: choose another name"
            raise field_error(file, (*place, "function"), problem)
        _check_metrics(content, returned, found, file, place)
    return Rubric(content.weights, content.function, content.normalise, content.ranges, returned)


def _check_metrics(
    content: _RubricFile,
    returned: Collection[str],
    found: FoundFunction | None,
    file: Path,
    place: Sequence[str],
) -> None:
    """Raise SuiteError for a weight or a range whose metric the function never returns."""
    available = [*sorted(returned), *SERVER_METRICS]
    function = content.function or (found and found.address)
    for part, keys in (("weights", content.weights), ("ranges", content.ranges)):
        for key in keys:
            metric = Term.read(key).metric
            if metric in available or is_tool_metric(metric):
                continue
            hint = did_you_mean(metric, available)
            server = ", ".join(SERVER_METRICS)
            problem = (
                f"without `function`, or a function `evaluate`, there is no metric {metric!r}{hint}; "
                f"the server provides {server}"
                if function is None
                else f"{function} returns no metric {metric!r}{hint} (it returns "
                f"{', '.join(sorted(returned)) or 'none'}; the server adds {server})"
            )
            raise field_error(file, (*place, part, key), problem)
