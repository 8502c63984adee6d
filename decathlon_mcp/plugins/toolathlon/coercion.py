"""Arguments that are JSON in a string become what the tool's schema asks for, as in Toolathlon.

Some models send an array as `"[1, 2]"`. Since June 2026 upstream repairs that before the call
(`coerce_mcp_arguments` in `utils/openai_agents_monkey_patch/custom_mcp_util.py`): where the schema allows an
object, array, number or boolean and no string, a string that contains such a value as JSON is replaced by it.
`$ref` and `allOf` are not followed there, and not here.

Schema and arguments come from outside, and upstream's rule has no limits. Here, a string that contains JSON
over the limits of a message stays a string, and so do all arguments if `MAX_STEPS` are not enough.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import anyio.to_thread
from pydantic_core import to_json

from decathlon_mcp.json_limits import MAX_NODES, check_json
from decathlon_mcp.types import JsonObject, as_object

MAX_STEPS = 200_000
"""Schemas of unions that are looked at for one call: some 50 ms. Without unions a call needs none."""
QUICK_STEPS = 2_000
QUICK_BYTES = 16_384
"""A call that needs more steps, or has longer arguments, is coerced in a thread."""

_ANY: JsonObject = {}
"""The schema that allows every value."""
_COERCIBLE = frozenset({"object", "array", "integer", "number", "boolean"})
_TYPES = _COERCIBLE | {"string", "null"}
"""A schema can name any number of others, which mean nothing."""


class _StepsError(Exception):
    """The unions of a schema need more steps."""


async def coerced_arguments(arguments: bytes, schema: JsonObject) -> bytes:
    """The JSON text of a tool's arguments with strings replaced as its input schema asks for.

    The same text if nothing is replaced, or if a limit is reached.
    """
    if len(arguments) <= QUICK_BYTES:
        with suppress(_StepsError):
            return _coerced(arguments, schema, QUICK_STEPS)
    try:
        return await anyio.to_thread.run_sync(_coerced, arguments, schema, MAX_STEPS)
    except _StepsError:
        return arguments


def _coerced(arguments: bytes, schema: JsonObject, max_steps: int) -> bytes:
    coercion = _Coercion(max_steps)
    try:
        before = json.loads(arguments)
        after = coercion.coerced(before, schema)
        if coercion.replaced == 0:
            return arguments
        text = _encoded(after)
        check_json(text)
    except (ValueError, RecursionError):
        return arguments
    return text


class _Coercion:
    """One call's arguments. `replaced`: how many strings were."""

    def __init__(self, max_steps: int) -> None:
        self.replaced = 0
        self._nodes = MAX_NODES
        self._steps = max_steps
        # By identity: one schema of an array's items is asked for each of them.
        self._types: dict[int, frozenset[str]] = {}

    def coerced(self, value: Any, schema: JsonObject) -> Any:
        declared = self._declared_types(schema)
        wanted = declared & _COERCIBLE
        if isinstance(value, str) and wanted and "string" not in declared:
            value = self._decoded(value, wanted)
        active = self._matching(value, schema)
        if isinstance(value, dict):
            properties = as_object(active.get("properties")) or _ANY
            others = _first_object(active.get("additionalProperties"))
            items = cast("JsonObject", value).items()
            return {
                key: self.coerced(item, _first_object(properties.get(key), others)) for key, item in items
            }
        if isinstance(value, list) and (item_schema := as_object(active.get("items"))) is not None:
            return [self.coerced(item, item_schema) for item in cast("list[Any]", value)]
        return cast("Any", value)

    def _decoded(self, text: str, wanted: frozenset[str]) -> Any:
        """The value of a JSON text if it has one of these types, else the text."""
        try:
            # A stand-in for what cannot be encoded, which only unpaired surrogates cannot.
            nodes = check_json(text.encode("utf-8", "replace"), max_nodes=self._nodes)
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if not any(_has_type(value, name) for name in wanted):
            return text
        self._nodes -= nodes
        self.replaced += 1
        return value

    def _matching(self, value: Any, schema: JsonObject) -> JsonObject:
        """The first schema of a union that allows the value, else the schema itself."""
        for option in self._options(schema):
            if any(_has_type(value, name) for name in self._declared_types(option)):
                return option
        return schema

    def _declared_types(self, schema: JsonObject) -> frozenset[str]:
        """All types that a schema or its unions name."""
        known = self._types.get(id(schema))
        if known is None:
            own = schema.get("type")
            names = cast("list[Any]", own) if isinstance(own, list) else [own]
            types = frozenset(name for name in names if isinstance(name, str) and name in _TYPES)
            known = types.union(*(self._declared_types(option) for option in self._options(schema)))
            self._types[id(schema)] = known
        return known

    def _options(self, schema: JsonObject) -> Iterator[JsonObject]:
        for keyword in ("anyOf", "oneOf"):
            options = schema.get(keyword)
            for option in cast("list[Any]", options) if isinstance(options, list) else ():
                self._steps -= 1
                if self._steps < 0:
                    raise _StepsError
                if isinstance(option, dict):
                    yield cast("JsonObject", option)


def _first_object(*values: object) -> JsonObject:
    """The first of the values that is an object."""
    return next((schema for value in values if (schema := as_object(value)) is not None), _ANY)


def _has_type(value: Any, name: str) -> bool:
    match name:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "null":
            return value is None
        case _:
            return False


def _encoded(value: Any) -> bytes:
    """JSON text in UTF-8. Raises ValueError."""
    try:
        # Upstream's MCP SDK sends NaN and infinity, which its `json.loads` reads, as null.
        return to_json(value, inf_nan_mode="null")
    except ValueError:
        # Unpaired surrogates, which are escaped here.
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
