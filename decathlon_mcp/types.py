"""JSON values and small types that every package uses."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeAlias, cast

import msgspec
from msgspec import Raw
from pydantic_core import to_json

JsonObject: TypeAlias = dict[str, Any]
Names: TypeAlias = Literal["decathlon", "toolathlon", "raw"]
Language: TypeAlias = Literal["en", "cn"]
Network: TypeAlias = Literal["none", "outbound"]
PreprocessSandbox: TypeAlias = Literal["auto", "own", "snapshot"]
"""Where a preprocess runs. `own`: in a sandbox of its own; processes that it leaves running end with it.
`snapshot`: in the agent's sandbox; what it changed there is removed or refused. `auto`: like `own`, but like
`snapshot` for tasks graded in place, and whenever processes are left running that the task may need."""


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


_encode_with_raw = msgspec.json.Encoder().encode


def as_json_with_raw(value: object) -> bytes:
    """Encode a JSON value as compact UTF-8. It may contain `msgspec.Raw`, whose text is copied unchanged."""
    try:
        return _encode_with_raw(value)
    except (ValueError, OverflowError):
        # Lone surrogates, and integers of more than 64 bits.
        return json.dumps(value, separators=(",", ":"), default=_decode_raw).encode()


def _decode_raw(value: object) -> Any:
    if isinstance(value, Raw):
        return json.loads(bytes(value))
    raise TypeError(f"{type(value).__name__} is no JSON value")
