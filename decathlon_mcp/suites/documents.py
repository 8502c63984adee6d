"""Reading and validating a checkout's YAML and JSON files. Errors name file, line and field."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.types import JsonObject, as_object
from decathlon_mcp.validation import find_problems

T = TypeVar("T")

# The loader of libyaml, where PyYAML was built with it, is about ten times as fast.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_DEPTH = 100
"""Levels of a YAML file; real files have fewer than ten."""
MAX_FILE_BYTES = 1 << 20
MAX_MERGED = 10_000
"""Entries that merges (`<<`) add to the mappings of a file; each line could double them."""

MAX_DIGITS = 20


def file_error(path: Path, problem: str, *, line: int | None = None, field: str | None = None) -> SuiteError:
    """The error for a file of the checkout; line and field are named if they are known."""
    where = str(path) if line is None else f"{path}, line {line}"
    return SuiteError(
        f"{where}: {f'{field}: ' if field else ''}{problem}", file=str(path), line=line, field=field
    )


def field_error(path: Path, field: Sequence[str | int], problem: str) -> SuiteError:
    """The error for a field of a YAML or JSON file, given by the keys and indexes that lead to it."""
    return file_error(path, problem, line=_line(path, field), field=".".join(map(str, field)) or None)


class Loader(_SafeLoader):
    """Reads plain values, as the safe loader, of what does not take long."""

    merged = 0

    def flatten_mapping(self, node: Any) -> None:
        before = len(node.value)
        _SafeLoader.flatten_mapping(self, node)
        self.merged += len(node.value) - before
        if self.merged > MAX_MERGED:
            raise yaml.MarkedYAMLError(problem="too much is merged", problem_mark=node.start_mark)

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > MAX_DIGITS:  # 1:1:1 is an integer, too
            raise yaml.MarkedYAMLError(problem="too long a number", problem_mark=node.start_mark)
        return _SafeLoader.construct_yaml_int(self, node)


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises SuiteError for what is no file, too long, or cannot be read."""
    try:
        with open_regular(path, follow=True) as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise file_error(path, error.strerror or str(error)) from None
    if len(content) > MAX_FILE_BYTES:
        raise file_error(path, f"it has more than {MAX_FILE_BYTES >> 20} MiB")
    return content


def read_text(path: Path) -> str:
    """The text of a file. Raises SuiteError as `read_bytes`, and if it is not UTF-8."""
    try:
        return read_bytes(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise file_error(path, f"not UTF-8 ({error.reason} at byte {error.start})") from None


def read_json(path: Path) -> JsonObject:
    """The object in a JSON file. Raises SuiteError if it holds anything else."""
    try:
        text = read_text(path)
        value = json.loads(text, parse_int=_parse_integer, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError for half a pair
    except json.JSONDecodeError as error:
        raise file_error(path, f"not JSON: {error.msg}", line=error.lineno) from None
    except RecursionError:
        raise file_error(path, "not JSON that can be read: nested too deeply") from None
    except UnicodeEncodeError:
        raise file_error(path, "not JSON that can be read: half of a surrogate pair") from None
    except ValueError as error:
        raise file_error(path, f"not JSON that can be read: {error}") from None
    return _object(path, value)


def _parse_integer(text: str) -> int:
    # Python neither reads nor writes integers of more than 4,300 digits, and clients know 64 bits at most.
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits, {MAX_DIGITS} at most")
    return int(text)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def read_yaml(path: Path) -> JsonObject:
    """The mapping in a YAML file; empty for an empty file. Raises SuiteError if it holds anything else."""
    text = read_text(path)
    try:
        _check_depth(path, text)
        value = yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "cannot be parsed"
        raise file_error(path, f"not YAML: {problem}", line=mark.line + 1 if mark else None) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # Some messages have several lines.
        raise file_error(path, f"not YAML: {' '.join(str(error).split())}") from None
    return {} if value is None else _object(path, value)


def _check_depth(path: Path, text: str) -> None:
    """Raise SuiteError for a document that is nested too deeply."""
    # libyaml recurses without a limit, and a document of 100 kB ends the process (SIGSEGV).
    if sum(text.count(sign) for sign in "[{-?:") <= MAX_DEPTH:
        return
    depth = 0
    for event in cast("Any", yaml).parse(text, Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1
            raise file_error(path, f"nested more than {MAX_DEPTH} levels deep", line=line)


def validate(path: Path, schema: TypeAdapter[T], value: JsonObject, *, more_names: Collection[str] = ()) -> T:
    """Validate a value that was read from `path`. Raises SuiteError for the first field that does not fit.

    `more_names`: fields of the file that are not in this schema, for suggestions.
    """
    try:
        return schema.validate_python(value)
    except ValidationError as error:
        first, *more = find_problems(error, value, schema, more_names=more_names)
        message = first.message + (f" (and {len(more)} more)" if more else "")
        raise field_error(path, first.path, message) from None


def _object(path: Path, value: object) -> JsonObject:
    if (mapping := as_object(value)) is None:
        raise file_error(path, "a mapping was expected", line=1)
    return mapping


def _line(path: Path, field: Sequence[str | int]) -> int | None:
    """The line of a field, from 1; for a missing field, the line of the mapping that lacks it."""
    # JSON is a subset of YAML, so the same parser gives the positions in both.
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
