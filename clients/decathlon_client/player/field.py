"""What a form consists of: a tree of fields, made from a tool's JSON schema. Knows no screen.

What no field fits (a schema that holds itself, keys that are not known before, any value at all) is a field
for JSON: nothing that a tool takes is out of reach.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from decathlon_client.player.schema import SCALARS, Plain, Schema, UnreadableSchemaError, plain, type_of
from decathlon_client.values import as_object

LONG_WORDS = frozenset(
    [
        "body",
        "code",
        "content",
        "contents",
        "css",
        "html",
        "markdown",
        "message",
        "new",
        "old",
        "patch",
        "prompt",
        "query",
        "script",
        "sql",
        "text",
    ]
)
"""Names that mostly hold several lines."""
LONG_LENGTH = 200


class Kind(StrEnum):
    """How a field is filled in."""

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
    """One value of a tool's arguments. `schema` is its own, without references at its top.

    `choices` of a CHOICE are JSON values, `fields` those of an OBJECT, `options` the kinds of value that a
    UNION can be. An ARRAY's `items` is the schema of what is in it, read when something is added.
    """

    name: str
    kind: Kind
    schema: Schema
    required: bool = False
    nullable: bool = False
    choices: tuple[Any, ...] = ()
    fields: tuple[Field, ...] = ()
    options: tuple[Field, ...] = ()
    items: Field | None = None

    @property
    def description(self) -> str:
        """The schema's own words, on one line."""
        return " ".join(str(self.schema.get("description") or "").split())

    @property
    def has_default(self) -> bool:
        return "default" in self.schema

    @property
    def default(self) -> Any:
        return self.schema.get("default")

    @property
    def hint(self) -> str:
        """What is to be put in, in a word or two: `whole number, 1 to 10`."""
        told = self.kind.value if self.kind is not Kind.LONG_TEXT else Kind.TEXT.value
        if self.kind is Kind.ARRAY and self.items is not None:
            told = f"list of {self.items.hint.partition(',')[0]}"
        least, most = self.schema.get("minimum"), self.schema.get("maximum")
        if least is not None and most is not None:
            told += f", {least:g} to {most:g}"
        elif least is not None:
            told += f", from {least:g}"
        elif most is not None:
            told += f", to {most:g}"
        return f"{told}, or null" if self.nullable else told


def form_of(schema: Schema) -> Field:
    """A tool's arguments: a group, or JSON where the schema cannot be read as one."""
    try:
        read = plain(schema, schema)
        if not read.alternatives and (type_of(read.schema) or "object") == "object":
            return _object("", read, schema, required=True)
    except UnreadableSchemaError:
        pass
    return Field("", Kind.JSON, schema, required=True)


def _field(name: str, schema: object, root: Schema, seen: frozenset[str], *, required: bool) -> Field:
    try:
        read = plain(schema, root, seen)
        made = _of(name, read, root, required=required)
    except UnreadableSchemaError:
        made = None
    return made or Field(name, Kind.JSON, _own(schema, root), required)


def _own(schema: object, root: Schema) -> Schema:
    """A schema that is read no further, with the definitions that it may refer to."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**definitions, **(as_object(schema) or {})}


def _of(name: str, read: Plain, root: Schema, *, required: bool) -> Field | None:
    """None for what only JSON can say."""
    schema, nullable = read.schema, read.nullable
    if (choices := _choices(read, root)) is not None:
        shown = (*choices, None) if nullable else choices
        return Field(name, Kind.CHOICE, schema, required, nullable, choices=shown)
    if read.alternatives:
        return _union(name, read, root, required=required)
    match read.type:
        case "string":
            kind = Kind.LONG_TEXT if _is_long(name, schema) else Kind.TEXT
        case "integer":
            kind = Kind.INTEGER
        case "number":
            kind = Kind.NUMBER
        case "object" if as_object(schema.get("properties")):
            return _object(name, read, root, required=required)
        case "array" if as_object(schema.get("items")) is not None and "prefixItems" not in schema:
            items = _field("", schema["items"], root, read.seen, required=True)
            return Field(name, Kind.ARRAY, schema, required, nullable, items=items)
        case _:
            return None
    return Field(name, kind, schema, required, nullable)


def _choices(read: Plain, root: Schema) -> tuple[Any, ...] | None:
    """The values there are to choose from, where there are not endless many."""
    schema = read.schema
    if "const" in schema:
        return (schema["const"],)
    if isinstance(schema.get("enum"), list):
        return tuple(cast("list[Any]", schema["enum"]))
    if read.type == "boolean" and not read.alternatives:
        return (True, False)
    each = [_choices(plain(branch, root, read.seen), root) for branch in read.alternatives]
    if not each or any(choices is None for choices in each):
        return None
    return tuple(choice for choices in each for choice in choices or ())


def _union(name: str, read: Plain, root: Schema, *, required: bool) -> Field:
    types = {type_of(plain(branch, root, read.seen).schema) for branch in read.alternatives}
    bare = all(set(branch) <= {"type", "title"} for branch in read.alternatives)
    if bare and types <= set(SCALARS):
        schema = {**read.schema, "type": [*sorted(str(each) for each in types)]}
        return Field(name, Kind.SCALAR, schema, required, read.nullable)
    options = tuple(
        _field(_title(branch, root, read.seen), branch, root, read.seen, required=True)
        for branch in read.alternatives
    )
    return Field(name, Kind.UNION, read.schema, required, read.nullable, options=options)


def _title(branch: Schema, root: Schema, seen: frozenset[str]) -> str:
    """What an alternative is called; an empty one is called by its kind."""
    try:
        return str(plain(branch, root, seen).schema.get("title") or "")
    except UnreadableSchemaError:
        return ""


def _object(name: str, read: Plain, root: Schema, *, required: bool) -> Field:
    needed: list[str] = read.schema.get("required") or []
    properties = as_object(read.schema.get("properties")) or {}
    fields = tuple(
        _field(each, inner, root, read.seen, required=each in needed) for each, inner in properties.items()
    )
    ordered = (*(each for each in fields if each.required), *(each for each in fields if not each.required))
    return Field(name, Kind.OBJECT, _own(read.schema, root), required, read.nullable, fields=ordered)


def _is_long(name: str, schema: Schema) -> bool:
    most = schema.get("maxLength")
    if isinstance(most, int) and most <= LONG_LENGTH:
        return False
    lines = "\n" in str(schema.get("default") or "")
    words = name.lower().replace("-", "_").split("_")
    return lines or bool(LONG_WORDS.intersection(words)) or (isinstance(most, int) and most > LONG_LENGTH)


def shown(value: Any) -> str:
    """A JSON value as one reads it in a list: texts without their quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
