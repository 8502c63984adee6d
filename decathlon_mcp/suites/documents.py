"""Reading the checkout's YAML and JSON: what does not fit is an error that names file, line and field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.types import JsonObject, as_object

T = TypeVar("T")

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML was built with it: some ten times as fast."""


def broken(path: Path, problem: str, *, line: int | None = None, field: str | None = None) -> SuiteError:
    """The error for a file that is not as Toolathlon's layout has it."""
    where = str(path) if line is None else f"{path}, line {line}"
    return SuiteError(
        f"{where}: {f'{field}: ' if field else ''}{problem}", file=str(path), line=line, field=field
    )


def read_text(path: Path) -> str:
    """The file's text. Raises SuiteError where it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise broken(path, f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise broken(path, error.strerror or str(error)) from None


def read_json(path: Path) -> JsonObject:
    """The object that a JSON file holds."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise broken(path, f"not JSON: {error.msg}", line=error.lineno) from None
    return _object(path, value)


def read_yaml(path: Path) -> JsonObject:
    """The mapping that a YAML file holds; an empty file is an empty one."""
    try:
        value = yaml.load(read_text(path), Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "cannot be parsed"
        raise broken(path, f"not YAML: {problem}", line=mark.line + 1 if mark else None) from None
    except (yaml.YAMLError, ValueError) as error:
        raise broken(path, f"not YAML: {error}") from None
    return {} if value is None else _object(path, value)


def check(path: Path, shape: TypeAdapter[T], value: JsonObject) -> T:
    """`value`, read from `path`, as the shape has it. Raises SuiteError for the first field that does not."""
    try:
        return shape.validate_python(value)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first, more = problems[0], len(problems) - 1
        field = ".".join(str(part) for part in first["loc"])
        problem = first["msg"] + (f" (and {more} more)" if more else "")
        raise broken(path, problem, line=_line(path, first["loc"]), field=field or None) from None


def _object(path: Path, value: object) -> JsonObject:
    if (found := as_object(value)) is None:
        raise broken(path, f"a mapping was expected, not {type(value).__name__}", line=1)
    return found


def _line(path: Path, field: Sequence[str | int]) -> int | None:
    """The line of a field, from 1; of what it would stand in where it is missing. JSON is read as YAML."""
    try:
        node = cast("Any", yaml).compose(read_text(path), Loader)
    except (yaml.YAMLError, SuiteError):
        return None
    line = None
    for part in field:
        if isinstance(node, yaml.MappingNode):
            pairs = [(key, value) for key, value in node.value if key.value == str(part)]
            if not pairs:
                break
            line, node = pairs[-1][0].start_mark.line + 1, pairs[-1][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line or (node.start_mark.line + 1 if node is not None else None)
