"""Problems that pydantic finds in a value: its field, the message, and the name that was probably meant.

Text of the value is not repeated, because it may be a credential.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema

from decathlon_mcp.foreign_names import similar
from decathlon_mcp.types import as_object

Path: TypeAlias = tuple[str | int, ...]

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""Pydantic's types of errors about a field that does not exist."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One invalid field. `path`: the keys and indexes that lead to it; empty for the value itself."""

    path: Path
    message: str

    @property
    def field(self) -> str:
        return ".".join(map(str, self.path))


def find_problems(
    error: ValidationError,
    value: object,
    schema: TypeAdapter[Any] | None = None,
    *,
    more_names: Iterable[str] = (),
) -> list[Problem]:
    """The problems of a value that was validated, at least one; fields that do not exist come first.

    `schema` has the names of the valid fields, for suggestions; `more_names` are further ones.
    """
    names = {*more_names, *_field_names(schema)}
    messages: dict[Path, list[str]] = {}
    # A misspelt field is also a missing one, and the misspelling explains more.
    details = error.errors(include_url=False, include_input=False)
    for detail in sorted(details, key=lambda detail: detail["type"] not in _UNKNOWN):
        path = _path(detail["loc"], value)
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] in _UNKNOWN:
            close = similar(str(path[-1]), names, count=1)
            message = "there is no such field" + (f"; did you mean {close[0]}?" if close else "")
        messages.setdefault(path, []).append(message)
    # Of a union, pydantic reports every member. The one that fits best has its problem further inside.
    inner = [
        path
        for path in messages
        if not any(len(other) > len(path) and other[: len(path)] == path for other in messages)
    ]
    return [Problem(path, "; ".join(dict.fromkeys(messages[path]))) for path in inner]


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
