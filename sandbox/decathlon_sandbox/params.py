"""A request's parameters, each read with the type that the wire gives it."""

from __future__ import annotations

from decathlon_sandbox import wire
from decathlon_sandbox.fault import Fault
from decathlon_sandbox.strict_json import as_list, as_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


MOST = 1e9
"""Of seconds: no clock or timer overflows."""


def _wrong(name: str, wanted: str) -> Fault:
    return Fault(wire.BAD_PARAMS, f"`{name}` must be {wanted}")


def text(params: dict[str, Any], name: str, default: str | None = None) -> str:
    value = params.get(name, default)
    if not isinstance(value, str) or "\0" in value:
        raise _wrong(name, "a string")
    return value


def path(params: dict[str, Any], name: str) -> str:
    value = text(params, name)
    if not value.startswith("/"):
        raise _wrong(name, "an absolute path")
    return value


def number(params: dict[str, Any], name: str) -> float:
    value = params.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST:
        raise _wrong(name, f"a number from 0 to {MOST:.0f}")
    return float(value)


def optional_number(params: dict[str, Any], name: str) -> float | None:
    return None if params.get(name) is None else number(params, name)


def whole_number(params: dict[str, Any], name: str, most: int) -> int:
    value = params.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise _wrong(name, f"a whole number from 0 to {most}")
    return value


def port(params: dict[str, Any], name: str) -> int:
    value = whole_number(params, name, 65535)
    if not value:
        raise _wrong(name, "a port")
    return value


def ports(params: dict[str, Any], name: str) -> list[int]:
    value = as_list(params.get(name, []))
    if value is None:
        raise _wrong(name, "a list of ports")
    return [port({name: item}, name) for item in value]


def flag(params: dict[str, Any], name: str) -> bool:
    value = params.get(name, False)
    if not isinstance(value, bool):
        raise _wrong(name, "true or false")
    return value


def one_of(params: dict[str, Any], name: str, *choices: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or value not in choices:
        raise _wrong(name, f"one of {', '.join(choices)}")
    return value


def mapping(params: dict[str, Any], name: str) -> dict[str, Any]:
    value = as_object(params.get(name, {}))
    if value is None:
        raise _wrong(name, "an object")
    return value


def strings(params: dict[str, Any], name: str) -> list[str]:
    value = as_list(params.get(name, []))
    if value is None or not all(isinstance(item, str) and "\0" not in item for item in value):
        raise _wrong(name, "a list of strings")
    return value


def objects(params: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = as_list(params.get(name, []))
    if value is None or not all(isinstance(item, dict) for item in value):
        raise _wrong(name, "a list of objects")
    return value


def named_strings(params: dict[str, Any], name: str) -> dict[str, str]:
    value = mapping(params, name)
    for key, item in value.items():
        if not isinstance(item, str) or "\0" in key + item or not key or "=" in key:
            raise _wrong(name, "an object of strings")
    return value
