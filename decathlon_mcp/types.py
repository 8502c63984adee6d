"""JSON values and small types that every package uses."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeAlias, cast

from pydantic_core import to_json

JsonObject: TypeAlias = dict[str, Any]
Names: TypeAlias = Literal["decathlon", "toolathlon", "raw"]
Language: TypeAlias = Literal["en", "cn"]
Network: TypeAlias = Literal["none", "outbound"]


def as_object(value: object) -> JsonObject | None:
    """Return `value` if it is a JSON object, else None."""
    return cast("JsonObject", value) if isinstance(value, dict) else None


def as_json(value: object) -> bytes:
    """Encode a JSON value as compact UTF-8."""
    try:
        return to_json(value)
    except ValueError:
        # A sandbox may send lone surrogates, which UTF-8 cannot encode; `json.dumps` escapes them.
        return json.dumps(value).encode()
