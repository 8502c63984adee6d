"""Results of tools and definitions of tools, generated from MCP's schema, with one fault each.

The schema is that of `mcp_types`, which is generated from the published ones: 2025-11-25 has every member of
results and definitions that any revision from 2024-11-05 to 2026-07-28 has. `faulty` replaces each value
somewhere in a complete example by each of some others, or removes it. Some of what comes out is not at fault:
the SDK decides, and `nulls`, since the SDK accepts null for optional members and the published schemas none.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from mcp_types import methods
from mcp_types.version import LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION
from pydantic import BaseModel, TypeAdapter

SURFACES = methods.SERVER_RESULTS
VALUES: tuple[Any, ...] = (
    *(None, True, 0, 5, -1, 0.5, 1 << 80, "", "maybe", "user", "text", "ftp://[", "5"),
    *([], [1], ["x"], [None], {}, {"a": 1}, {"a": None}, {"type": "text"}, {"progressToken": None}),
    *("AAA=", "AA=", "A A=", "====", "2025-02-29T00:00:00Z", "2025-01-12T15:00:58+01:00"),
)
ENVELOPES: dict[str, Any] = {
    "tools/call": {"resultType": "complete"},
    "tools/list": {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"},
}
"""What this server adds to a result in the newest revision."""
Path = tuple[str | int, ...]


def example(kind: Any, name: str = "") -> Any:
    """A value of this type with all members that it can have; of a union, the first that is no null."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return example(arguments[0], name)
    if origin is Literal:
        return arguments[0]
    if origin in (Union, UnionType):
        return example(next(kind for kind in arguments if kind is not NoneType), name)
    if origin is list:
        return [example(kind, name) for kind in _arms(arguments[0])]
    if origin is dict:
        return {"key": {}}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {
            field.alias or name: example(field.annotation, field.alias or name)
            for name, field in kind.model_fields.items()
        }
    if kind is str:
        return _STRINGS.get(name, "words")
    others: dict[Any, Any] = {int: 1, float: 1, bool: False}
    return others.get(kind, {})


_STRINGS = {
    "uri": "file:///a",
    "src": "data:,",
    "data": "AAAA",
    "blob": "AAAA",
    "lastModified": "2024-02-29T15:00:58.5Z",
}
"""Examples of members whose string is not any text."""


def _arms(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def complete(method: str) -> dict[str, Any]:
    """A result of the method with all members that the newest revision with a handshake has."""
    return example(SURFACES[method, LATEST_HANDSHAKE_VERSION])


def faulty(value: Any) -> Iterator[Any]:
    """The value with each value in it replaced or removed, and each object with a member more."""
    for path in _paths(value):
        for other in VALUES:
            yield _replaced(value, path, other)
        if path:
            yield _replaced(value, path, _REMOVED)
        if isinstance(_at(value, path), dict):
            yield _replaced(value, (*path, "unknown"), {"a": 1})


@cache
def results() -> list[dict[str, Any]]:
    """Results of tools, each once."""
    seeds = result_seeds()
    return _unique([*seeds, *(result for seed in seeds for result in faulty(seed))])


def result_seeds() -> list[dict[str, Any]]:
    """Results without fault: of each kind of content, and with all other members."""
    whole = complete("tools/call")
    blob = {"type": "resource", "resource": {"uri": "file:///a", "blob": "AAAA"}}
    contents: list[Any] = [[], [blob], *([item] for item in whole["content"])]
    return [
        *({"content": content, "isError": False} for content in contents),
        {**whole, "content": contents[2]},
    ]


@cache
def definitions() -> list[dict[str, Any]]:
    """Definitions of tools, each once."""
    seed = definition_seed()
    return _unique([seed, *faulty(seed)])


def definition_seed() -> dict[str, Any]:
    """A definition of a tool with all members, without fault."""
    return complete("tools/list")["tools"][0]


def nulls(kind: Any, value: Any) -> list[str]:
    """The members that are null where the schema of a message allows only their absence."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return nulls(arguments[0], value)
    if origin in (Union, UnionType):
        tag = cast("dict[str, Any]", value).get("type") if isinstance(value, dict) else None
        arms = [arm for arm in arguments if arm is not NoneType]
        arms = [arm for arm in arms if tag is None or _tag(arm) in (None, tag)]
        found = [nulls(arm, value) for arm in arms]
        return min(found, key=len) if found else []
    if origin is list and isinstance(value, list):
        return [place for item in cast("list[Any]", value) for place in nulls(arguments[0], item)]
    if not (isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, dict)):
        return []
    places: list[str] = []
    for name, field in kind.model_fields.items():
        key = field.alias or name
        if key in value:
            found = nulls(field.annotation, value[key])
            places += [key] if value[key] is None and key != "structuredContent" else []
            places += [f"{key}.{place}" for place in found]
    return places


def _tag(kind: Any) -> str | None:
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    field = getattr(kind, "model_fields", {}).get("type")
    return None if field is None else get_args(field.annotation)[0]


def refusal(method: str, version: str, result: dict[str, Any], *, strict: bool = False) -> str | None:
    """Why the SDK's client refuses a result; None if it does not. `strict`: it converts nothing.

    The envelope of the revision is added.
    """
    if version == LATEST_MODERN_VERSION:
        result = {**result, **ENVELOPES[method]}
    kinds: tuple[Any, ...] = SURFACES[method, version], methods.MONOLITH_RESULTS[method]
    try:
        if strict:
            for kind in kinds:
                TypeAdapter[Any](kind).validate_python(result, by_name=False, by_alias=True, strict=True)
        else:
            methods.parse_server_result(method, version, result)
    except ValueError as error:
        return str(error)
    return None


_REMOVED = object()


def _unique(candidates: list[Any]) -> list[dict[str, Any]]:
    """The objects among the candidates, each once."""
    objects: dict[str, Any] = {
        json.dumps(value, sort_keys=True): value for value in candidates if isinstance(value, dict)
    }
    return list(objects.values())


def _paths(value: Any) -> Iterator[Path]:
    yield ()
    members: Any = ()
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value).items()
    elif isinstance(value, list):
        members = enumerate(cast("list[Any]", value))
    for key, member in members:
        yield from ((key, *path) for path in _paths(member))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _replaced(value: Any, path: Path, other: Any) -> Any:
    if not path:
        return other
    value = copy.deepcopy(value)
    parent = _at(value, path[:-1])
    if other is _REMOVED:
        del parent[path[-1]]
    else:
        parent[path[-1]] = other
    return value
