"""What was filled into a form, and what it means: a JSON value, or faults at fields. Knows no screen.

A draft has the shape of its field: text for what is typed (numbers and JSON too), an index or None for a
CHOICE, a dict for an OBJECT, a list for an ARRAY, an index (or None) and a draft for a UNION. What is left
empty is not sent; `""` is the empty text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from decathlon_client.player.fault import Fault, Path, faults_of
from decathlon_client.player.field import Field, Kind
from decathlon_client.values import as_object

Draft: TypeAlias = Any
EMPTY_TEXT = '""'


class _Absent:
    """What is not there: not sent at all."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()


class UnfitError(ValueError):
    """A value that the form cannot show; only JSON can."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a draft says: the value (ABSENT for nothing), and what does not fit, each at its path."""

    value: Any
    faults: tuple[Fault, ...]


def blank(field: Field) -> Draft:
    """Nothing filled in. Defaults are not: they are shown as such, and the tool puts them in."""
    match field.kind:
        case Kind.CHOICE:
            alone = field.required and len(field.choices) == 1
            return 0 if alone else None
        case Kind.OBJECT:
            return {each.name: blank(each) for each in field.fields}
        case Kind.ARRAY:
            return []
        case Kind.UNION:
            return (None, None)
        case _:
            return ""


def read(field: Field, draft: Draft) -> Reading:
    """The value of a whole form, checked against its schema."""
    faults: list[Fault] = []
    value = _value(field, draft, (), faults)
    if not faults and value is not ABSENT:
        faults.extend(faults_of(value, field.schema, ()))
    return Reading(value, tuple(faults))


def best_effort(field: Field, draft: Draft) -> Any:
    """What of a draft can be read, for whoever goes on in JSON."""
    value = _value(field, draft, (), [])
    return {} if value is ABSENT else value


def _value(field: Field, draft: Draft, path: Path, faults: list[Fault]) -> Any:
    """ABSENT for nothing; a fault is added for what does not fit."""
    match field.kind:
        case Kind.OBJECT:
            value = _object(field, draft, path, faults)
        case Kind.ARRAY:
            value = _array(field, draft, path, faults)
        case Kind.UNION:
            option = None if draft[0] is None else field.options[int(draft[0])]
            value = ABSENT if option is None else _value(option, draft[1], path, faults)
        case Kind.CHOICE:
            value = ABSENT if draft is None else field.choices[draft]
        case _:
            value = _typed(field, str(draft), path, faults)
    if value is ABSENT and field.required and not any(fault.path == path for fault in faults):
        if field.has_default:
            return field.default
        if field.nullable:
            return None
        empty = ' (for an empty text write "")' if field.kind in (Kind.TEXT, Kind.LONG_TEXT) else ""
        faults.append(Fault(path, f"required{empty}"))
    return value


def _object(field: Field, draft: Mapping[str, Draft], path: Path, faults: list[Fault]) -> Any:
    inside: list[Fault] = []
    found: dict[str, Any] = {}
    for each in field.fields:
        value = _value(each, draft[each.name], (*path, each.name), inside)
        if value is not ABSENT:
            found[each.name] = value
    if not field.required and not touched(field, draft):
        return ABSENT
    faults.extend(inside)
    return found


def _array(field: Field, draft: Sequence[Draft], path: Path, faults: list[Fault]) -> Any:
    assert field.items is not None
    if not draft and not (field.required and not field.nullable and not field.has_default):
        return ABSENT
    values: list[Any] = []
    for number, each in enumerate(draft):
        value = _value(field.items, each, (*path, number), faults)
        values.append(None if value is ABSENT else value)
    return values


def touched(field: Field, draft: Draft) -> bool:
    """Whether anything was filled in."""
    match field.kind:
        case Kind.OBJECT:
            return any(touched(each, draft[each.name]) for each in field.fields)
        case Kind.UNION:
            return draft[0] is not None
        case Kind.CHOICE:
            return draft != blank(field)
        case _:
            return bool(draft)


def _typed(field: Field, text: str, path: Path, faults: list[Fault]) -> Any:
    value: Any
    if not text:
        return ABSENT
    if field.kind in (Kind.TEXT, Kind.LONG_TEXT):
        value = "" if text == EMPTY_TEXT else text
        faults.extend(faults_of(value, field.schema, path))
        return value
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        if field.kind is Kind.SCALAR and "string" in field.schema["type"]:
            return text
        said = f"not JSON: {error}" if field.kind is Kind.JSON else f"not a {field.kind.value}"
        faults.append(Fault(path, said))
        return ABSENT
    if value is None and field.nullable:
        return None
    if field.kind in (Kind.INTEGER, Kind.NUMBER):
        number = _number(value, whole=field.kind is Kind.INTEGER)
        if number is None:
            faults.append(Fault(path, f"not a {field.kind.value}"))
            return ABSENT
        value = number
    found = faults_of(value, field.schema, path)
    if found and field.kind is Kind.SCALAR and "string" in field.schema["type"]:
        return text
    faults.extend(found)
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _number(value: object, *, whole: bool) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not whole:
        return value
    return int(value) if value == int(value) else None


def draft_of(field: Field, value: Any) -> Draft:
    """The draft that reads as this value. Raises UnfitError where there is none."""
    if value is ABSENT:
        return blank(field)
    match field.kind:
        case Kind.CHOICE:
            for number, choice in enumerate(field.choices):
                if choice == value and isinstance(choice, bool) is isinstance(value, bool):
                    return number
            raise UnfitError(f"{field.name or 'a value'} is none of the choices")
        case Kind.OBJECT:
            return _object_draft(field, value)
        case Kind.ARRAY:
            if not isinstance(value, list) or field.items is None:
                raise UnfitError(f"{field.name or 'a value'} is not a list")
            return [draft_of(field.items, each) for each in cast("list[Any]", value)]
        case Kind.UNION:
            return _union_draft(field, value)
        case _:
            return _text_of(field, value)


def _object_draft(field: Field, value: Any) -> Draft:
    found = as_object(value)
    if found is None:
        raise UnfitError(f"{field.name or 'it'} is not an object")
    if strange := set(found).difference(each.name for each in field.fields):
        raise UnfitError(f"there is no field {', '.join(sorted(strange))}")
    return {each.name: draft_of(each, found.get(each.name, ABSENT)) for each in field.fields}


def _union_draft(field: Field, value: Any) -> Draft:
    for number, option in enumerate(field.options):
        try:
            draft = draft_of(option, value)
        except UnfitError:
            continue
        if not read(option, draft).faults:
            return (number, draft)
    raise UnfitError(f"{field.name or 'a value'} is none of the kinds that it may be")


def _text_of(field: Field, value: Any) -> str:
    match field.kind:
        case Kind.TEXT | Kind.LONG_TEXT if isinstance(value, str):
            return value or EMPTY_TEXT
        case Kind.SCALAR if isinstance(value, str):
            return value if _stays_text(field, value) else json.dumps(value, ensure_ascii=False)
        case Kind.TEXT | Kind.LONG_TEXT:
            pass
        case Kind.INTEGER | Kind.NUMBER if (
            value is not None and _number(value, whole=field.kind is Kind.INTEGER) is None
        ):
            pass
        case _:
            return json.dumps(value, ensure_ascii=False)
    raise UnfitError(f"{field.name or 'a value'} is not a {field.kind.value}")


def _stays_text(field: Field, value: str) -> bool:
    return read(field, value) == Reading(value, ()) if value else False


def each_field(field: Field, draft: Draft, path: Path = ()) -> Iterator[tuple[Path, Field]]:
    """Every field that a draft shows, with its path; groups and lists before what is in them."""
    yield path, field
    match field.kind:
        case Kind.OBJECT:
            for each in field.fields:
                yield from each_field(each, draft[each.name], (*path, each.name))
        case Kind.ARRAY if field.items is not None:
            for number, each in enumerate(draft):
                yield from each_field(field.items, each, (*path, number))
        case Kind.UNION if draft[0] is not None:
            yield from each_field(field.options[int(draft[0])], draft[1], path)
        case _:
            pass
