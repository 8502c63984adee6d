"""JSON values and small types that every package uses."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import Any, Literal, TypeAlias, cast

import msgspec
from msgspec import Raw
from pydantic_core import to_json

JsonObject: TypeAlias = dict[str, Any]
Names: TypeAlias = Literal["decathlon", "toolathlon", "verified", "raw"]
Language: TypeAlias = Literal["en", "cn"]
NoteRole: TypeAlias = Literal["system", "user", "assistant", "reasoning"]
"""Whose message a note is. `reasoning`: what a model thought before it answered."""
Network: TypeAlias = Literal["none", "outbound"]
ServerStart: TypeAlias = Literal["lazy", "ahead", "eager"]
"""When a task's MCP servers start, if its tool list is known. `lazy`: each at its first call. `ahead`: one
after the other once the episode is ready, or at its first call. `eager`: all at set-up."""
PreprocessSandbox: TypeAlias = Literal["auto", "own", "snapshot"]
"""Where a preprocess runs. `own`: in a sandbox of its own; processes that it leaves running end with it.
`snapshot`: in the agent's sandbox; what it changed there is removed or refused. `auto`: like `own`, but like
`snapshot` for tasks graded in place, and whenever processes are left running that the task may need."""


HANDLE = re.compile(r"[0-9a-f]{48}")
"""Form of the handle of an episode."""
_PUBLIC_ID = re.compile(r"[0-9a-f]{16}")


def public_id(handle: str) -> str:
    """The name of an episode where its handle must not be: 16 hexadecimal digits of the handle's SHA-256.

    It gives no access to the episode.
    """
    return sha256(handle.encode()).hexdigest()[:16]


def is_public_id(text: str) -> bool:
    """Whether a text has the form of a public id."""
    return _PUBLIC_ID.fullmatch(text) is not None


def as_object(value: object) -> JsonObject | None:
    """Return `value` if it is a JSON object, else None."""
    return cast("JsonObject", value) if isinstance(value, dict) else None


def json_kind(value: object) -> str:
    """What JSON calls the kind of a value, for messages: `an object`, `null`."""
    if value is None:
        return "null"
    kinds = ((bool, "a boolean"), (str, "a string"), (int | float, "a number"), (dict, "an object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "an array")


def read_object(text: str | bytes) -> JsonObject | None:
    """The JSON object that a text is; None for anything else."""
    try:
        return as_object(json.loads(text))
    except (ValueError, RecursionError):
        return None


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
