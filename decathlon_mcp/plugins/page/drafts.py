"""Form drafts: from what the user typed to JSON arguments and back.

A draft has the shape of its field: a text for typed input (numbers and JSON too), an index or None for a
CHOICE, a dict for an OBJECT, a list for an ARRAY, an index (or None) and a draft for a UNION. Empty input is
not sent; `""` is the empty text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

from decathlon_mcp.plugins.page.schema import Field, Kind
from decathlon_mcp.types import as_object

Path: TypeAlias = tuple[str | int, ...]
"""Location in the arguments: property names and item indices."""
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
    "multipleOf": "a multiple of",
}
EMPTY_TEXT = '""'


@dataclass(frozen=True, slots=True)
class Violation:
    """A value that does not match its schema; `path` locates it."""

    path: Path
    message: str


def violations_of(value: Any, schema: Mapping[str, Any], path: Path) -> list[Violation]:
    """Validate a value. An invalid or external schema gives no violations: the tool decides."""
    try:
        validator: Any = Draft202012Validator(dict(schema), registry=Registry())
        errors = cast("list[ValidationError]", list(validator.iter_errors(value)))
    except (SchemaError, Unresolvable, RecursionError, TypeError, ValueError, AttributeError, re.error):
        return []
    return [violation for error in errors for violation in _violations_from(error, path)]


def _violations_from(error: ValidationError, path: Path) -> Iterator[Violation]:
    location = (*path, *error.absolute_path)
    limit: Any = error.validator_value
    match str(error.validator):
        case "required":
            for name in limit:
                if name not in cast("Any", error.instance):
                    yield Violation((*location, name), "required")
                    return
        case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum" | "multipleOf" as word:
            yield Violation(location, f"{_BOUNDS[word]} {limit:g}")
        case "minLength":
            yield Violation(location, f"at least {limit} characters" if limit != 1 else "must not be empty")
        case "maxLength":
            yield Violation(location, f"at most {limit} characters, not {len(cast('str', error.instance))}")
        case "pattern":
            yield Violation(location, f"does not match {limit}")
        case "minItems":
            yield Violation(location, f"at least {limit} in the list")
        case "maxItems":
            yield Violation(location, f"at most {limit} in the list")
        case "uniqueItems":
            yield Violation(location, "the list contains duplicates")
        case "anyOf" | "oneOf":
            yield Violation(location, "matches none of the allowed kinds")
        case _:
            yield Violation(location, " ".join(error.message.split())[:200])


Draft: TypeAlias = Any


class _Absent:
    """Marker for a value that is not sent."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()


class NotRepresentableError(ValueError):
    """A value that the form cannot represent; the user must edit it as JSON."""


@dataclass(frozen=True, slots=True)
class FormReading:
    """Result of reading a draft: the value (ABSENT if nothing is sent) and its violations."""

    value: Any
    violations: tuple[Violation, ...]


def empty_draft(field: Field) -> Draft:
    """The empty draft. Defaults are displayed but not filled in; the tool applies them."""
    match field.kind:
        case Kind.CHOICE:
            alone = field.required and len(field.choices) == 1
            return 0 if alone else None
        case Kind.OBJECT:
            return {item.name: empty_draft(item) for item in field.fields}
        case Kind.ARRAY:
            return []
        case Kind.UNION:
            return (None, None)
        case _:
            return ""


def read_draft(field: Field, draft: Draft) -> FormReading:
    """Read a whole form and validate it against its schema."""
    violations: list[Violation] = []
    value = _value(field, draft, (), violations)
    if not violations and value is not ABSENT:
        violations.extend(violations_of(value, field.schema, ()))
    return FormReading(value, tuple(violations))


def partial_value(field: Field, draft: Draft) -> Any:
    """The readable part of a draft, to continue editing as JSON."""
    value = _value(field, draft, (), [])
    return {} if value is ABSENT else value


def _value(field: Field, draft: Draft, path: Path, violations: list[Violation]) -> Any:
    """The value of a draft, ABSENT if nothing is sent; violations are appended."""
    match field.kind:
        case Kind.OBJECT:
            value = _object(field, draft, path, violations)
        case Kind.ARRAY:
            value = _array(field, draft, path, violations)
        case Kind.UNION:
            option = None if draft[0] is None else field.options[int(draft[0])]
            value = ABSENT if option is None else _value(option, draft[1], path, violations)
        case Kind.CHOICE:
            value = ABSENT if draft is None else field.choices[draft]
        case _:
            value = _typed_value(field, str(draft), path, violations)
    if value is ABSENT and field.required and not any(violation.path == path for violation in violations):
        if field.has_default:
            return field.default
        if field.nullable:
            return None
        empty = ' (write "" for an empty text)' if field.kind in (Kind.TEXT, Kind.LONG_TEXT) else ""
        violations.append(Violation(path, f"required{empty}"))
    return value


def _object(field: Field, draft: Mapping[str, Draft], path: Path, violations: list[Violation]) -> Any:
    nested: list[Violation] = []
    found: dict[str, Any] = {}
    for item in field.fields:
        value = _value(item, draft[item.name], (*path, item.name), nested)
        if value is not ABSENT:
            found[item.name] = value
    if not field.required and not is_filled(field, draft):
        return ABSENT
    violations.extend(nested)
    return found


def _array(field: Field, draft: Sequence[Draft], path: Path, violations: list[Violation]) -> Any:
    assert field.items is not None
    if not draft and not (field.required and not field.nullable and not field.has_default):
        return ABSENT
    values: list[Any] = []
    for number, item in enumerate(draft):
        value = _value(field.items, item, (*path, number), violations)
        values.append(None if value is ABSENT else value)
    return values


def is_filled(field: Field, draft: Draft) -> bool:
    """Whether the user entered anything."""
    match field.kind:
        case Kind.OBJECT:
            return any(is_filled(item, draft[item.name]) for item in field.fields)
        case Kind.UNION:
            return draft[0] is not None
        case Kind.CHOICE:
            return draft != empty_draft(field)
        case _:
            return bool(draft)


def _typed_value(field: Field, text: str, path: Path, violations: list[Violation]) -> Any:
    value: Any
    if not text:
        return ABSENT
    if field.kind in (Kind.TEXT, Kind.LONG_TEXT):
        value = "" if text == EMPTY_TEXT else text
        violations.extend(violations_of(value, field.schema, path))
        return value
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except ValueError as error:
        if field.kind is Kind.SCALAR and "string" in field.schema["type"]:
            return text
        message = f"not JSON: {error}" if field.kind is Kind.JSON else f"not a {field.kind.value}"
        violations.append(Violation(path, message))
        return ABSENT
    if value is None and field.nullable:
        return None
    if field.kind in (Kind.INTEGER, Kind.NUMBER):
        number = _number(value, full_text=field.kind is Kind.INTEGER)
        if number is None:
            violations.append(Violation(path, f"not a {field.kind.value}"))
            return ABSENT
        value = number
    found = violations_of(value, field.schema, path)
    if found and field.kind is Kind.SCALAR and "string" in field.schema["type"]:
        return text
    violations.extend(found)
    return value


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _number(value: object, *, full_text: bool) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not full_text:
        return value
    return int(value) if value == int(value) else None


def draft_from_value(field: Field, value: Any) -> Draft:
    """The draft for a value. Raises NotRepresentableError if the form cannot hold it."""
    if value is ABSENT:
        return empty_draft(field)
    match field.kind:
        case Kind.CHOICE:
            for number, choice in enumerate(field.choices):
                if choice == value and isinstance(choice, bool) is isinstance(value, bool):
                    return number
            raise NotRepresentableError(f"{field.name or 'a value'} is not one of the choices")
        case Kind.OBJECT:
            return _object_draft(field, value)
        case Kind.ARRAY:
            if not isinstance(value, list) or field.items is None:
                raise NotRepresentableError(f"{field.name or 'a value'} is not a list")
            return [draft_from_value(field.items, item) for item in cast("list[Any]", value)]
        case Kind.UNION:
            return _union_draft(field, value)
        case _:
            return _text_draft(field, value)


def _object_draft(field: Field, value: Any) -> Draft:
    found = as_object(value)
    if found is None:
        raise NotRepresentableError(f"{field.name or 'it'} is not an object")
    if unknown := set(found).difference(item.name for item in field.fields):
        raise NotRepresentableError(f"unknown field {', '.join(sorted(unknown))}")
    return {item.name: draft_from_value(item, found.get(item.name, ABSENT)) for item in field.fields}


def _union_draft(field: Field, value: Any) -> Draft:
    for number, option in enumerate(field.options):
        try:
            draft = draft_from_value(option, value)
        except NotRepresentableError:
            continue
        if not read_draft(option, draft).violations:
            return (number, draft)
    raise NotRepresentableError(f"{field.name or 'a value'} matches none of the allowed kinds")


def _text_draft(field: Field, value: Any) -> str:
    match field.kind:
        case Kind.TEXT | Kind.LONG_TEXT if isinstance(value, str):
            return value or EMPTY_TEXT
        case Kind.SCALAR if isinstance(value, str):
            return value if _reads_as_same_text(field, value) else json.dumps(value, ensure_ascii=False)
        case Kind.TEXT | Kind.LONG_TEXT:
            pass
        case Kind.INTEGER | Kind.NUMBER if (
            value is not None and _number(value, full_text=field.kind is Kind.INTEGER) is None
        ):
            pass
        case _:
            return json.dumps(value, ensure_ascii=False)
    raise NotRepresentableError(f"{field.name or 'a value'} is not a {field.kind.value}")


def _reads_as_same_text(field: Field, value: str) -> bool:
    return read_draft(field, value) == FormReading(value, ()) if value else False
