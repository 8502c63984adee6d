"""A tool's JSON Schema as a tree of form fields.

References are followed, `allOf` is merged, null is separated. What no field can express (a recursive schema,
unknown keys, any value at all) becomes a JSON field, so that every argument can be given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias, cast
from urllib.parse import unquote

from decathlon_mcp.types import as_object

Schema: TypeAlias = Mapping[str, Any]

SCALARS = ("string", "integer", "number", "boolean")
LONG_WORDS = frozenset(
    (
        *("body", "code", "content", "contents", "css", "html", "markdown", "message", "new", "old"),
        *("patch", "prompt", "query", "script", "sql", "text"),
    )
)
"""Argument names that usually hold several lines."""
LONG_LENGTH = 200


class UnreadableSchemaError(ValueError):
    """A schema that cannot be resolved: a reference that is missing, recursive or external."""


@dataclass(frozen=True, slots=True)
class FlatSchema:
    """One schema with top-level references resolved.

    `alternatives` are the branches of `anyOf`, `oneOf` or several types; `schema` is what they share.
    `nullable`: null is allowed too, and not among the alternatives. `seen`: references followed so far, to
    detect recursion.
    """

    schema: Schema
    alternatives: tuple[Schema, ...]
    nullable: bool
    seen: frozenset[str]


def flatten(schema: object, root: Schema, seen: frozenset[str] = frozenset()) -> FlatSchema:
    """Resolve one schema. Raises UnreadableSchemaError."""
    resolved, seen = _resolve(schema, root, seen)
    branches = [item for key in ("anyOf", "oneOf") for item in _as_list(resolved.get(key))]
    common = {key: value for key, value in resolved.items() if key not in ("anyOf", "oneOf")}
    types = _types(common)
    if not branches and len(types) > 1:
        branches = [{"type": name} for name in types]
        common = {key: value for key, value in common.items() if key != "type"}
    nullable = types == ["null"]
    real: list[Schema] = []
    for branch in branches:
        inner, _ = _resolve(branch, root, seen)
        if _types(inner) == ["null"] or ("const" in inner and inner["const"] is None):
            nullable = True
        else:
            real.append(as_object(branch) or {})
    if len(real) == 1:
        joined = flatten(_merge(common, _resolve(real[0], root, seen)[0]), root, seen)
        return replace(joined, nullable=nullable or joined.nullable)
    choices = common.get("enum")
    if isinstance(choices, list) and None in choices:
        nullable = True
        common["enum"] = [item for item in cast("list[object]", choices) if item is not None]
    return FlatSchema(common, tuple(real), nullable, seen)


def type_of(schema: Schema) -> str | None:
    """The single type of a schema, stated or implied by other keywords; None if any value is allowed."""
    types = _types(schema)
    if len(types) == 1:
        return types[0]
    if not types and "properties" in schema:
        return "object"
    return "array" if not types and "items" in schema else None


def _resolve(schema: object, root: Schema, seen: frozenset[str]) -> tuple[dict[str, Any], frozenset[str]]:
    """The schema with references followed and `allOf` merged."""
    if schema is True:
        return {}, seen
    found = as_object(schema)
    if found is None:
        raise UnreadableSchemaError("the schema is not an object")
    resolved = {key: value for key, value in found.items() if key not in ("$ref", "allOf")}
    reference: object = found.get("$ref")
    if isinstance(reference, str):
        if reference in seen:
            raise UnreadableSchemaError(f"{reference} is recursive")
        seen = seen | {reference}
        target, seen = _resolve(_look_up(reference, root), root, seen)
        resolved = _merge(target, resolved)
    for part in _as_list(found.get("allOf")):
        inner, seen = _resolve(part, root, seen)
        resolved = _merge(inner, resolved)
    return resolved, seen


def _merge(base: Schema, override: Schema) -> dict[str, Any]:
    """Merge two schemas; `override` wins."""
    merged = {**base, **override}
    for key in ("properties", "$defs"):
        if key in base and key in override:
            merged[key] = {**override[key], **base[key], **override[key]}
    if "required" in base and "required" in override:
        merged["required"] = [*base["required"], *override["required"]]
    return merged


def _look_up(reference: str, root: Schema) -> object:
    if not reference.startswith("#"):
        raise UnreadableSchemaError(f"{reference} is not in this document")
    found: object = root
    for word in unquote(reference[1:]).split("/")[1:]:
        mapping = as_object(found) or {}
        name = word.replace("~1", "/").replace("~0", "~")
        if name not in mapping:
            raise UnreadableSchemaError(f"{reference} does not exist")
        found = mapping[name]
    return found


def _types(schema: Schema) -> list[str]:
    declared: object = schema.get("type")
    if isinstance(declared, str):
        return [declared]
    return [str(item) for item in cast("list[object]", declared)] if isinstance(declared, list) else []


def _as_list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


class Kind(StrEnum):
    """Input kind of a field; the value is its name for the user."""

    TEXT = "text"
    LONG_TEXT = "long text"
    INTEGER = "whole number"
    NUMBER = "number"
    SCALAR = "text or number"
    CHOICE = "choice"
    OBJECT = "group"
    ARRAY = "list"
    UNION = "one of several"
    JSON = "JSON"


@dataclass(frozen=True, slots=True)
class Field:
    """One value of a tool's arguments."""

    name: str
    kind: Kind
    schema: Schema
    """Of this value, with top-level references resolved."""
    required: bool = False
    nullable: bool = False
    choices: tuple[Any, ...] = ()
    """JSON values of a CHOICE."""
    fields: tuple[Field, ...] = ()
    options: tuple[Field, ...] = ()
    items: Field | None = None
    """The schema of an ARRAY's items, read when an item is added."""

    @property
    def description(self) -> str:
        """The schema's description on one line."""
        return " ".join(str(self.schema.get("description") or "").split())

    @property
    def has_default(self) -> bool:
        return "default" in self.schema

    @property
    def default(self) -> Any:
        return self.schema.get("default")

    @property
    def hint(self) -> str:
        """Short hint on the expected value: `whole number, 1 to 10`."""
        hint = self.kind.value if self.kind is not Kind.LONG_TEXT else Kind.TEXT.value
        if self.kind is Kind.ARRAY and self.items is not None:
            hint = f"list of {self.items.hint.partition(',')[0]}"
        minimum, maximum = self.schema.get("minimum"), self.schema.get("maximum")
        if minimum is not None and maximum is not None:
            hint += f", {minimum:g} to {maximum:g}"
        elif minimum is not None:
            hint += f", from {minimum:g}"
        elif maximum is not None:
            hint += f", to {maximum:g}"
        return f"{hint}, or null" if self.nullable else hint


MAX_FORM_FIELDS = 500
MAX_CHOICES = 2_000
"""Limits of a form; the arguments of a tool with more are given as JSON."""
JSON_ONLY = Field("", Kind.JSON, {}, required=True)
"""The form of a tool whose schema gives none."""


def make_form(schema: str) -> Field:
    """The form of a tool with this schema, as JSON text."""
    form = form_from_schema(json.loads(schema))
    fields = choices = 0
    for each in _all_fields(form):
        fields, choices = fields + 1, choices + len(each.choices)
        if fields > MAX_FORM_FIELDS or choices > MAX_CHOICES:
            return JSON_ONLY
    return form


def _all_fields(field: Field) -> Iterator[Field]:
    yield field
    for inner in (*field.fields, *field.options, *((field.items,) if field.items else ())):
        yield from _all_fields(inner)


def form_from_schema(schema: Schema) -> Field:
    """The form for a tool's arguments: a group, or one JSON field if the schema is not an object."""
    try:
        flat = flatten(schema, schema)
        if not flat.alternatives and (type_of(flat.schema) or "object") == "object":
            return _object("", flat, schema, required=True)
    except UnreadableSchemaError:
        pass
    return Field("", Kind.JSON, schema, required=True)


def _field(name: str, schema: object, root: Schema, seen: frozenset[str], *, required: bool) -> Field:
    try:
        field = _field_from(name, flatten(schema, root, seen), root, required=required)
    except UnreadableSchemaError:
        field = None
    return field or Field(name, Kind.JSON, _with_definitions(schema, root), required)


def _with_definitions(schema: object, root: Schema) -> Schema:
    """A schema together with the definitions it may refer to."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**definitions, **(as_object(schema) or {})}


def _field_from(name: str, flat: FlatSchema, root: Schema, *, required: bool) -> Field | None:
    """The field, or None if only JSON can express the value."""
    schema, nullable = flat.schema, flat.nullable
    if (choices := _choices(flat, root)) is not None:
        values = (*choices, None) if nullable else choices
        return Field(name, Kind.CHOICE, schema, required, nullable, choices=values)
    if flat.alternatives:
        return _union(name, flat, root, required=required)
    match type_of(flat.schema):
        case "string":
            kind = Kind.LONG_TEXT if _is_long_text(name, schema) else Kind.TEXT
        case "integer":
            kind = Kind.INTEGER
        case "number":
            kind = Kind.NUMBER
        case "object" if as_object(schema.get("properties")):
            return _object(name, flat, root, required=required)
        case "array" if as_object(schema.get("items")) is not None and "prefixItems" not in schema:
            items = _field("", schema["items"], root, flat.seen, required=True)
            return Field(name, Kind.ARRAY, schema, required, nullable, items=items)
        case _:
            return None
    return Field(name, kind, schema, required, nullable)


def _choices(flat: FlatSchema, root: Schema) -> tuple[Any, ...] | None:
    """The allowed values, if they are enumerated."""
    schema = flat.schema
    if "const" in schema:
        return (schema["const"],)
    if isinstance(schema.get("enum"), list):
        return tuple(cast("list[Any]", schema["enum"]))
    if type_of(flat.schema) == "boolean" and not flat.alternatives:
        return (True, False)
    branches = [_choices(flatten(branch, root, flat.seen), root) for branch in flat.alternatives]
    if not branches or any(choices is None for choices in branches):
        return None
    return tuple(choice for choices in branches for choice in choices or ())


def _union(name: str, flat: FlatSchema, root: Schema, *, required: bool) -> Field:
    branches = [(branch, flatten(branch, root, flat.seen).schema) for branch in flat.alternatives]
    types = {str(type_of(schema)) for _, schema in branches}
    if types <= set(SCALARS) and all(set(branch) <= {"type", "title"} for branch, _ in branches):
        schema = {**flat.schema, "type": sorted(types)}
        return Field(name, Kind.SCALAR, schema, required, flat.nullable)
    options = tuple(
        _field(str(schema.get("title") or ""), branch, root, flat.seen, required=True)
        for branch, schema in branches
    )
    return Field(name, Kind.UNION, flat.schema, required, flat.nullable, options=options)


def _object(name: str, flat: FlatSchema, root: Schema, *, required: bool) -> Field:
    required_names: list[str] = flat.schema.get("required") or []
    properties = as_object(flat.schema.get("properties")) or {}
    fields = tuple(
        _field(key, inner, root, flat.seen, required=key in required_names)
        for key, inner in properties.items()
    )
    ordered = tuple(sorted(fields, key=lambda field: not field.required))
    schema = _with_definitions(flat.schema, root)
    return Field(name, Kind.OBJECT, schema, required, flat.nullable, fields=ordered)


def _is_long_text(name: str, schema: Schema) -> bool:
    maximum = schema.get("maxLength")
    if isinstance(maximum, int):
        return maximum > LONG_LENGTH
    words = name.lower().replace("-", "_").split("_")
    return "\n" in str(schema.get("default") or "") or bool(LONG_WORDS.intersection(words))


def display_value(value: Any) -> str:
    """A JSON value for display: texts without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
