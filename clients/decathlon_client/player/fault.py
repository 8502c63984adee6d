"""What of a value does not fit its schema, each at its place, in words for who filled it in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

Path: TypeAlias = tuple[str | int, ...]
"""Where in the arguments: names and numbers of items."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`path` leads to the value that does not fit."""

    path: Path
    message: str


def faults_of(value: Any, schema: Mapping[str, Any], path: Path) -> list[Fault]:
    """A schema that is wrong itself, or refers to what is elsewhere, finds no fault: the tool will say."""
    try:
        validator: Any = Draft202012Validator(dict(schema), registry=Registry())
        errors = cast("list[ValidationError]", list(validator.iter_errors(value)))
    except (SchemaError, Unresolvable, RecursionError, TypeError, ValueError, AttributeError, re.error):
        return []
    return [fault for error in errors for fault in _faults(error, path)]


def _faults(error: ValidationError, path: Path) -> Iterator[Fault]:
    place = (*path, *error.absolute_path)
    wanted: Any = error.validator_value
    match str(error.validator):
        case "required":
            for name in wanted:
                if name not in cast("Any", error.instance):
                    yield Fault((*place, name), "required")
                    return
        case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum" | "multipleOf" as word:
            yield Fault(place, f"{_BOUNDS[word]} {wanted:g}")
        case "minLength":
            yield Fault(place, f"at least {wanted} characters" if wanted != 1 else "must not be empty")
        case "maxLength":
            yield Fault(place, f"at most {wanted} characters, not {len(cast('str', error.instance))}")
        case "pattern":
            yield Fault(place, f"does not match {wanted}")
        case "minItems":
            yield Fault(place, f"at least {wanted} in the list")
        case "maxItems":
            yield Fault(place, f"at most {wanted} in the list")
        case "uniqueItems":
            yield Fault(place, "something is in the list twice")
        case "anyOf" | "oneOf":
            yield Fault(place, "fits none of the kinds that it may be")
        case _:
            yield Fault(place, " ".join(error.message.split())[:200])


_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
    "multipleOf": "a multiple of",
}
