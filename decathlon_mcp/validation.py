"""Validation of text and values from outside: messages about faults, with the name that was probably meant.

A name can be as long as a request. Comparing it takes time that grows with its length times the other names',
and every message that repeats it is as long, also in logs. Of a value that pydantic refuses no text is
repeated, because it may be a credential.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, TypeVar, cast

from decathlon_client.client_values import one_line as one_line
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic_core import ErrorDetails

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.types import as_object

MAX_NAME_CHARACTERS = 200
"""Length of the longest name here. Messages do not repeat longer names."""
MAX_SIMILAR_CHARACTERS = 100
MAX_CANDIDATES = 600
"""More than a suite has tasks. An agent may have named 2,000 tools, and call a missing tool again and
again."""
MAX_COMPARED = 16
"""Candidates that are compared exactly: two names of 100 characters can take a millisecond."""

MAX_ARGUMENTS = 100
MAX_FAULTS = 5
"""Invalid arguments that an error message lists."""

Path: TypeAlias = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""Pydantic's types of errors about a field that does not exist."""
_KINDS = {
    "string": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "datetime": "a date and time in ISO 8601, such as `2026-01-31T12:00:00Z`",
    **dict.fromkeys(("list", "tuple", "set"), "an array"),
    **dict.fromkeys(("dict", "mapping", "model", "dataclass"), "an object"),
}
"""What JSON calls the types in the names of pydantic's faults."""
_FAULTS = {
    "missing": "is required",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_pattern_mismatch": "must match the pattern `{pattern}`",
    "too_long": "must have at most {max_length} items",
    "too_short": "must have at least {min_length} items",
    "finite_number": "must be a finite number",
}


def quoted(name: str) -> str:
    """The name in quotes, or its length if it is too long to be shown."""
    return repr(name) if len(name) < MAX_NAME_CHARACTERS else f"of {len(name):,} characters"


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of a message about an unknown name: the candidate that resembles it; empty if none does."""
    return "".join(f"; did you mean {near}?" for near in similar(name, candidates, count=1))


def similar(name: str, candidates: Iterable[str], *, count: int, cutoff: float = 0.6) -> list[str]:
    """At most `count` candidates that resemble the name, best first; none for a long name.

    Long candidates, and candidates after the first MAX_CANDIDATES, are passed over. `cutoff`: least
    similarity, 0 to 1, as in `difflib`.
    """
    if len(name) > MAX_SIMILAR_CHARACTERS:
        return []
    matcher = difflib.SequenceMatcher(b=name)
    bounds: list[tuple[float, str]] = []
    for candidate in islice(candidates, MAX_CANDIDATES):
        if len(candidate) <= MAX_SIMILAR_CHARACTERS:
            matcher.set_seq1(candidate)
            if matcher.real_quick_ratio() >= cutoff and (bound := matcher.quick_ratio()) >= cutoff:
                bounds.append((bound, candidate))
    likely = [candidate for _, candidate in heapq.nlargest(MAX_COMPARED, bounds)]
    return difflib.get_close_matches(name, likely, n=count, cutoff=cutoff)


@dataclass(frozen=True, slots=True)
class Problem:
    """One invalid field. `path`: the keys and indexes that lead to it; empty for the value itself."""

    path: Path
    message: str

    @property
    def field(self) -> str:
        parts = map(str, self.path)
        return ".".join(part if len(part) < MAX_NAME_CHARACTERS else quoted(part) for part in parts)


def find_problems(
    error: ValidationError,
    value: object,
    schema: TypeAdapter[Any] | None = None,
    *,
    more_names: Iterable[str] = (),
) -> list[Problem]:
    """The problems of a value that was validated, at least one; fields that do not exist come first.

    `schema` has the names of the valid fields, for suggestions; `more_names` are further names.
    """
    names = {*more_names, *_field_names(schema)}
    messages: dict[Path, list[str]] = {}
    # A misspelt field is also missing, and the misspelling explains more.
    details = error.errors(include_url=False, include_input=False)
    for detail in sorted(details, key=lambda detail: detail["type"] not in _UNKNOWN):
        path = _path(detail["loc"], value)
        message = _fault_text(detail)
        if detail["type"] in _UNKNOWN:
            message = f"there is no such field{did_you_mean(str(path[-1]), names)}"
        messages.setdefault(path, []).append(message)
    # Of a union, pydantic reports every member. The best fitting member has its problem furthest inside.
    inner = [
        path
        for path in messages
        if not any(len(other) > len(path) and other[: len(path)] == path for other in messages)
    ]
    return [Problem(path, "; ".join(dict.fromkeys(messages[path]))) for path in inner]


def read_arguments(model: type[Model], source: str, values: Mapping[str, Any]) -> Model:
    """The arguments of a client as an instance of the model.

    `source` names what they are given to. null stands for a member that is not there, where one need not be.
    Raises BadRequestError naming each wrong member.
    """
    if len(values) > MAX_ARGUMENTS:
        raise BadRequestError(f"{source}: more than {MAX_ARGUMENTS} arguments")
    optional = {name for name, field in model.model_fields.items() if not field.is_required()}
    given = {name: value for name, value in values.items() if value is not None or name not in optional}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        problems = find_problems(error, given, more_names=model.model_fields)[:MAX_FAULTS]
    faults = "; ".join(f"`{problem.field or 'arguments'}`: {problem.message}" for problem in problems)
    fields = ", ".join(f"`{name}`" for name in model.model_fields) or "no arguments"
    raise BadRequestError(f"{source}: {faults}; it takes {fields}")


def _fault_text(fault: ErrorDetails) -> str:
    """A fault without the words of Python: clients of all languages read it."""
    kind, context = fault["type"], fault.get("ctx", {})
    if (text := _FAULTS.get(kind)) is not None:
        # A limit as JSON has it: 1 and not 1.0.
        whole = {name: int(x) for name, x in context.items() if isinstance(x, float) and x.is_integer()}
        return text.format_map({**context, **whole})
    if (expected := _KINDS.get(kind.partition("_")[0])) is not None and kind != "string_unicode":
        return f"must be {expected}"
    message = fault["msg"].removeprefix("Value error, ")
    return message if kind == "value_error" else message[:1].lower() + message[1:]


def _path(location: Sequence[str | int], value: Any) -> Path:
    """The keys and indexes of the value in pydantic's location, without names of types that it adds."""
    path: list[str | int] = []
    current = value
    for number, part in enumerate(location):
        mapping = as_object(current)
        is_last = number == len(location) - 1
        if mapping is not None and part in mapping:
            path.append(part)
            current = mapping[part]
        elif mapping is not None and isinstance(part, int) and part < len(mapping):
            # A mapping that is kept as pairs: the index of the pair, then 0 or 1.
            path.append(list(mapping)[part])
            current = list(mapping.values())[part]
        elif mapping is not None and is_last and isinstance(part, str) and part.isidentifier():
            path.append(part)  # a field that is missing
        elif isinstance(part, int) and isinstance(current, Sequence) and not isinstance(current, str):
            items = cast("Sequence[Any]", current)
            path.append(part)
            current = items[part] if part < len(items) else None
    return tuple(path)


def _field_names(schema: TypeAdapter[Any] | None) -> set[str]:
    """The names of all fields of a schema, wherever they are."""
    try:
        root = {} if schema is None else schema.json_schema()
    except PydanticInvalidForJsonSchema:
        return set()
    objects = [root, *root.get("$defs", {}).values()]
    return {name for node in objects for name in node.get("properties", ())}
