"""Problems that pydantic finds in a value, in words for people who have never seen pydantic.

Each problem names its field as it is written in the file, says what was expected, and suggests the name that
was probably meant. Text from files is not repeated, because it may be a credential.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic_core import ErrorDetails

from decathlon_mcp.foreign_names import quoted, similar
from decathlon_mcp.types import JsonObject, as_object

Path: TypeAlias = tuple[str | int, ...]

MAX_LISTED = 12
"""Fields that a message lists. Where there are more, it lists none."""

_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dataclass_type": "a mapping",
    "greater_than": "a number above {gt:,.10g}",
    "greater_than_equal": "a number of at least {ge:,.10g}",
    "less_than": "a number below {lt:,.10g}",
    "less_than_equal": "a number of at most {le:,.10g}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "literal_error": "{expected}",
    "enum": "{expected}",
}
"""What was expected, by pydantic's type of the error; the names in braces are in its context."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One invalid field. `path`: the keys and indexes that lead to it; empty for the value itself."""

    path: Path
    message: str

    @property
    def field(self) -> str:
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class _Found:
    """An error with its path in the value. `expected`: a noun; empty if the message is not of that form."""

    path: Path
    error: ErrorDetails
    expected: str

    @property
    def is_key(self) -> bool:
        """Whether the key itself is invalid, and not its value."""
        return self.error["loc"][-1:] == ("[key]",)

    @property
    def is_unknown(self) -> bool:
        return self.error["type"] in ("extra_forbidden", "unexpected_keyword_argument")

    @property
    def misspelling(self) -> str:
        """A key of the mapping that is probably the missing field, misspelt; empty if there is none."""
        if self.error["type"] != "missing" or not self.path:
            return ""
        keys = map(str, as_object(self.error["input"]) or ())
        return next(iter(similar(str(self.path[-1]), keys, count=1, cutoff=0.75)), "")


def find_problems(
    error: ValidationError,
    value: object,
    schema: TypeAdapter[Any] | None = None,
    *,
    more_names: Iterable[str] = (),
    shows_text: bool = False,
) -> list[Problem]:
    """The problems of a value that was validated, at least one.

    `schema` has the names of the valid fields, for suggestions; `more_names` are further ones at the top
    level. `shows_text`: whether messages may repeat text of the value.
    """
    details = error.errors(include_url=False)
    found = [_Found(_path(detail["loc"], value), detail, _expected(detail)) for detail in details]
    # Of a union, pydantic reports every member. The one that fits best has its problem further inside.
    inner = [
        item
        for item in found
        if not any(
            len(other.path) > len(item.path) and other.path[: len(item.path)] == item.path for other in found
        )
    ]
    # A misspelt field is also a missing one.
    unknown = {item.path for item in inner if item.is_unknown}
    by_place: dict[tuple[Path, bool], list[_Found]] = {}
    for item in inner:
        if item.misspelling and (*item.path[:-1], item.misspelling) in unknown:
            continue
        by_place.setdefault((item.path, item.is_key), []).append(item)
    names = _Names(schema, frozenset(more_names))
    return [Problem(path, _message(items, names, shows_text)) for (path, _), items in by_place.items()]


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


def _expected(error: ErrorDetails) -> str:
    template = _EXPECTED.get(error["type"])
    return "" if template is None else template.format_map(error.get("ctx", {}))


def _message(items: Sequence[_Found], names: _Names, shows_text: bool) -> str:
    first = items[0]
    kind, value, context = first.error["type"], first.error["input"], first.error.get("ctx", {})
    if first.is_unknown:
        return f"there is no such field{names.hint(first.path)}"
    if kind == "missing" and isinstance(first.path[-1], int):
        return "this entry is missing"
    if kind == "missing":
        hint = f"; is {first.misspelling!r} a misspelling of it?" if first.misspelling else ""
        return f"missing; it is required{hint}"
    if kind == "invalid_key":
        return "the name of a field must be text: put it in quotes"
    if first.is_key and first.expected:
        return f"{first.expected} was expected as the name"
    if expected := [item.expected for item in items if item.expected]:
        choices = " or ".join(dict.fromkeys(expected))
        return f"{choices} was expected, not {describe(value, shows_text)}{_similar_choice(items, value)}"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty" if context.get("min_length") == 1 else "is too short"
    if kind in ("too_long", "string_too_long"):
        return f"too long: at most {context.get('max_length')} were expected"
    message = first.error["msg"].removeprefix("Value error, ")
    return message if kind == "value_error" else message[:1].lower() + message[1:]


def describe(value: object, shows_text: bool = False) -> str:
    """What a value is, for messages; text only if `shows_text`."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"{value}"[:40]
        case None:
            return "nothing"
        case str():
            return quoted(value) if shows_text else "text"
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return f"a {type(value).__name__}"


def _similar_choice(items: Sequence[_Found], value: object) -> str:
    """A suggestion for a word that is not one of the valid ones."""
    choices = [
        word.strip("'")
        for item in items
        if item.error["type"] in ("literal_error", "enum")
        for word in item.expected.replace(" or ", ", ").split(", ")
    ]
    close = similar(value, choices, count=1) if isinstance(value, str) else []
    return f"; did you mean {close[0]}?" if close else ""


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of the fields of a schema. `more`: further ones at the top level."""

    schema: TypeAdapter[Any] | None
    more: frozenset[str]

    def hint(self, path: Path) -> str:
        """What an unknown field may have been meant to be."""
        valid = self._at(path[:-1])
        close = similar(str(path[-1]), valid, count=1)
        if close:
            return f"; did you mean {close[0]}?"
        return f"; the fields here are {', '.join(valid)}" if 0 < len(valid) <= MAX_LISTED else ""

    def _at(self, path: Path) -> list[str]:
        try:
            root: JsonObject = {} if self.schema is None else self.schema.json_schema()
        except PydanticInvalidForJsonSchema:
            root = {}
        nodes = [root]
        for part in path:
            nodes = [child for node in nodes for child in _children(node, part, root)]
        forms = [form for node in nodes for form in _forms(node, root)]
        fields = {name for form in forms for name in form.get("properties", ())}
        return sorted(fields if path else fields | self.more)


def _forms(node: JsonObject, root: JsonObject) -> Iterator[JsonObject]:
    """A node of a JSON schema and everything that it refers to, or that it is a union of."""
    yield node
    if isinstance(reference := node.get("$ref"), str):
        yield from _forms(root["$defs"][reference.rpartition("/")[2]], root)
    for keyword in ("anyOf", "oneOf", "allOf"):
        for member in node.get(keyword, ()):
            yield from _forms(member, root)


def _children(node: JsonObject, part: str | int, root: JsonObject) -> Iterator[JsonObject]:
    """The nodes of a field, a key or an index."""
    for form in _forms(node, root):
        properties = as_object(form.get("properties")) or {}
        if part in properties:
            yield properties[part]
            continue
        keyed = (as_object(form.get("patternProperties")) or {}).values()
        for child in (form.get("additionalProperties"), form.get("items"), *keyed):
            if (child_node := as_object(child)) is not None:
                yield child_node
