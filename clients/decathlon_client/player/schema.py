"""JSON Schema made plain: references followed, `allOf` joined, null told apart. Knows no form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast
from urllib.parse import unquote

from decathlon_client.values import as_object

Schema: TypeAlias = Mapping[str, Any]

SCALARS = ("string", "integer", "number", "boolean")


class UnreadableSchemaError(ValueError):
    """A schema that cannot be made plain: a reference to nowhere, to itself, or elsewhere."""


@dataclass(frozen=True, slots=True)
class Plain:
    """One schema without references at its top.

    `alternatives`: where it is one of several (`anyOf`, `oneOf`, several types), those, and `schema` is what
    they have in common. `nullable`: null will do, too; null is not among the alternatives then. `seen`: the
    references that led here, so that a schema which holds itself is recognised.
    """

    schema: Schema
    alternatives: tuple[Schema, ...]
    nullable: bool
    seen: frozenset[str]

    @property
    def type(self) -> str | None:
        """The one type it has, said or told by its other words; None where any value will do."""
        return type_of(self.schema)


def plain(schema: object, root: Schema, seen: frozenset[str] = frozenset()) -> Plain:
    """Raises UnreadableSchemaError."""
    flat, seen = _flat(schema, root, seen)
    branches = [each for key in ("anyOf", "oneOf") for each in _list(flat.get(key))]
    common = {key: value for key, value in flat.items() if key not in ("anyOf", "oneOf")}
    types = _types(common)
    if not branches and len(types) > 1:
        branches = [{"type": name} for name in types]
        common = {key: value for key, value in common.items() if key != "type"}
    nullable = types == ["null"]
    real: list[Schema] = []
    for branch in branches:
        inner, _ = _flat(branch, root, seen)
        if _types(inner) == ["null"] or ("const" in inner and inner["const"] is None):
            nullable = True
        else:
            real.append(as_object(branch) or {})
    if len(real) == 1:
        joined = plain({**_joined(common, _flat(real[0], root, seen)[0])}, root, seen)
        return Plain(joined.schema, joined.alternatives, nullable or joined.nullable, joined.seen)
    choices = common.get("enum")
    if isinstance(choices, list) and None in choices:
        nullable = True
        common["enum"] = [each for each in cast("list[object]", choices) if each is not None]
    return Plain(common, tuple(real), nullable, seen)


def type_of(schema: Schema) -> str | None:
    """The one type a schema has, said or told by its other words."""
    types = _types(schema)
    if len(types) == 1:
        return types[0]
    if not types and "properties" in schema:
        return "object"
    return "array" if not types and "items" in schema else None


def _flat(schema: object, root: Schema, seen: frozenset[str]) -> tuple[dict[str, Any], frozenset[str]]:
    """With its references followed and its `allOf` joined."""
    if schema is True:
        return {}, seen
    found = as_object(schema)
    if found is None:
        raise UnreadableSchemaError("a schema is an object")
    own = {key: value for key, value in found.items() if key not in ("$ref", "allOf")}
    reference: object = found.get("$ref")
    if isinstance(reference, str):
        if reference in seen:
            raise UnreadableSchemaError(f"{reference} holds itself")
        seen = seen | {reference}
        target, seen = _flat(_resolved(reference, root), root, seen)
        own = _joined(target, own)
    for part in _list(found.get("allOf")):
        inner, seen = _flat(part, root, seen)
        own = _joined(inner, own)
    return own, seen


def _joined(below: Schema, above: Schema) -> dict[str, Any]:
    """Both at once; of what both say, the one above has the last word."""
    both = {**below, **above}
    for key in ("properties", "$defs"):
        if key in below and key in above:
            both[key] = {**above[key], **below[key], **above[key]}
    if "required" in below and "required" in above:
        both["required"] = [*below["required"], *above["required"]]
    return both


def _resolved(reference: str, root: Schema) -> object:
    if not reference.startswith("#"):
        raise UnreadableSchemaError(f"{reference} is elsewhere")
    found: object = root
    for word in unquote(reference[1:]).split("/")[1:]:
        inside = as_object(found) or {}
        name = word.replace("~1", "/").replace("~0", "~")
        if name not in inside:
            raise UnreadableSchemaError(f"there is no {reference}")
        found = inside[name]
    return found


def _types(schema: Schema) -> list[str]:
    said: object = schema.get("type")
    if isinstance(said, str):
        return [said]
    return [str(each) for each in cast("list[object]", said)] if isinstance(said, list) else []


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []
