"""What a request may contain: JSON that every parser between a model and a task's server accepts.

The SDK cannot send anything else, and some of it ends the session with all its calls: half of a surrogate
pair, an integer of thousands of digits. So each request is checked before the SDK sees it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any, cast

from decathlon_client.errors import RequestError
from decathlon_client.values import JsonObject

MAX_DEPTH = 128
"""Depth of nested arrays and objects in one message; the server accepts no more."""
PARAMS_DEPTH = 2
MAX_NODES = 100_000
"""Values and keys in one message; the server accepts no more."""
MAX_DIGITS = 4_300
"""Digits of an integer; Python reads no more."""
SHOWN_CHARACTERS = 20

_FIRST_LONGER = 10**MAX_DIGITS


def parse_arguments(text: str) -> object:
    """Decode the JSON text that a model wrote; empty text is an empty object. Raises RequestError."""
    if not text.strip():
        return {}
    try:
        return cast("object", json.loads(text))
    except json.JSONDecodeError as error:
        raise _refusal(f"the arguments are not JSON: {error}") from None
    except RecursionError:
        raise _refusal(_TOO_DEEP) from None
    except ValueError:
        raise _refusal(_TOO_MANY_DIGITS) from None


def check_call(params: JsonObject) -> None:
    """Check the parameters of a `tools/call`. Raises RequestError, with a text for the model."""
    name, arguments = params.get("name"), params.get("arguments")
    if not isinstance(name, str):
        raise _refusal(f"the name of a tool must be a text, not {type(name).__name__}")
    if not isinstance(arguments, dict):
        raise _refusal("the arguments must be a JSON object")
    check_params(params)


def check_params(params: JsonObject) -> None:
    """Check the parameters of a request. Raises RequestError; cyclic values are too deep."""
    nodes = 0
    level: list[Any] = [params]
    # Level by level and not recursive: a value may be deeper than Python's stack.
    for _ in range(PARAMS_DEPTH, MAX_DEPTH + 1):
        children: list[Any] = []
        for container in level:
            keys, values = _contents(container)
            nodes += len(keys) + len(values)
            if nodes > MAX_NODES:
                raise _refusal(f"the request has more than {MAX_NODES:,} values and keys")
            for key in keys:
                _check_key(key)
            children += [value for value in values if _is_container(value)]
        if not children:
            return
        level = children
    raise _refusal(_TOO_DEEP)


def _contents(container: Any) -> tuple[Collection[Any], Collection[Any]]:
    """The keys and the values of an object; no keys, and the items of an array."""
    if not isinstance(container, dict):
        return (), container
    items = cast("dict[Any, Any]", container)
    return items.keys(), items.values()


def _check_key(key: object) -> None:
    if not isinstance(key, str):
        raise _refusal(f"a key of an object must be a text, not {type(key).__name__}")
    _check_text(key)


def _is_container(value: object) -> bool:
    """Whether a value contains others. Raises RequestError for one that is not JSON."""
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _refusal(f"{value} is not JSON: numbers must be finite")
    elif isinstance(value, int):
        if not -_FIRST_LONGER < value < _FIRST_LONGER:
            raise _refusal(_TOO_MANY_DIGITS)
    elif isinstance(value, (dict, list, tuple)):
        return True
    elif value is not None:
        raise _refusal(f"a value of type {type(value).__name__} is not JSON")
    return False


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = ascii(text[max(0, error.start - SHOWN_CHARACTERS) : error.start + 1])
        raise _refusal(f"{shown} ends in half of a surrogate pair: write the whole character") from None


_TOO_DEEP = f"the request is nested deeper than {MAX_DEPTH} levels"
_TOO_MANY_DIGITS = f"an integer has more than {MAX_DIGITS:,} digits"


def _refusal(message: str) -> RequestError:
    return RequestError(message, number=-32602, code="bad_request")
