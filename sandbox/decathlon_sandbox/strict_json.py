"""JSON as every parser on its way to the client takes it: a reply that one of them refused would be lost."""

from __future__ import annotations

import json
import math
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, TypeGuard

MAX_DEPTH = 150
"""The server's parser stops at 200; envelopes take some of that."""

_LONG_BYTES = 1 << 16
"""Of a line so long the brackets are dearer to count than the values to walk."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(
    rb"\\(?:(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.S,
)


def parse(line: bytes) -> tuple[Any, bytes]:
    """The value, and the line it can be relayed as.

    That is the line itself, but that half surrogate pairs (what is left of a text cut by UTF-16 units) become
    U+FFFD. Raises ValueError for what is not UTF-8, not JSON, holds NaN or an infinity, or is nested too
    deep.
    """
    if _SURROGATE.search(line):
        line = _ESCAPE.sub(_whole_escape, line)
    try:
        value = _decode(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deep") from None
    maybe = len(line) > _LONG_BYTES or line.count(b"[") + line.count(b"{") > MAX_DEPTH
    if maybe and _depth_exceeds(value, MAX_DEPTH):
        raise ValueError("nested too deep")
    return value, line


def as_object(value: Any) -> dict[str, Any] | None:
    """The value where it is an object, else None."""
    return value if _is_object(value) else None


def as_list(value: Any) -> list[Any] | None:
    """The value where it is an array, else None."""
    return value if _is_list(value) else None


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _whole_escape(match: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if match.group(2) is not None else match.group(0)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number out of range: {text[:40]}")
    return number


def _depth_exceeds(value: Any, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit + 1):
        level = [part for whole in level for part in _parts(whole) if isinstance(part, (dict, list))]
        if not level:
            return False
    return True


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if _is_object(value) else value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decode = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant).decode
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_encode_ascii = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode(value: Any) -> bytes:
    """For the server's strict parser: UTF-8, half surrogate pairs (undecodable file names) as `?`."""
    return _encode(value).encode("utf-8", "replace")


def encode_ascii(value: Any) -> bytes:
    """For a task's server: every string as it came, escaped."""
    return _encode_ascii(value).encode("ascii")
