"""Strict JSON: only what every parser between a task's server and the client accepts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeGuard

    JsonObject = dict[str, Any]
else:
    JsonObject = dict

# The server refuses a depth of more than 128, and the envelopes around a reply take some of that.
MAX_DEPTH = 120
# Values and keys. Decoding 64 MiB of `[]` would take 4 GB of memory. The server refuses more than 100,000,
# but results that are shortened may have more.
MAX_NODES = 500_000

# In longer lines, counting brackets costs more than walking the decoded values.
_MAX_COUNTED_BYTES = 1 << 16
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(
    rb"\\(?:(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.S,
)
_NOT_NODES = bytes(set(range(256)) - set(b"[{,:"))
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[{,:"'))


def parse(line: bytes) -> tuple[Any, bytes]:
    """Return the decoded value and the line to relay.

    The line is unchanged, except that unpaired surrogates become U+FFFD. Raises ValueError if the line is not
    UTF-8, not JSON, contains NaN or an infinity, is nested too deeply or has more than MAX_NODES values.
    """
    if _has_too_many_nodes(line):
        raise ValueError(f"more than {MAX_NODES} values")
    # Servers in JavaScript cut texts by UTF-16 units and so send half pairs, which strict parsers refuse.
    if _SURROGATE.search(line):
        line = _ESCAPE.sub(_replace_unpaired, line)
    try:
        value = _decode(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    may_be_deep = len(line) > _MAX_COUNTED_BYTES or line.count(b"[") + line.count(b"{") > MAX_DEPTH
    if may_be_deep and _depth_exceeds(value, MAX_DEPTH):
        raise ValueError("nested too deeply")
    return value, line


def as_object(value: Any) -> JsonObject | None:
    """Return the value if it is an object, else None."""
    return value if _is_object(value) else None


def as_list(value: Any) -> list[Any] | None:
    """Return the value if it is an array, else None."""
    return value if _is_list(value) else None


def _is_object(value: Any) -> TypeGuard[JsonObject]:
    return isinstance(value, dict)


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _has_too_many_nodes(line: bytes) -> bool:
    """Whether the line has more than MAX_NODES values and keys; checked before it is decoded."""
    # First with the characters in strings: few in all settle it in one pass.
    if len(line) <= MAX_NODES or len(line.translate(None, _NOT_NODES)) < MAX_NODES:
        return False
    # First the escaped backslashes, so that every backslash that remains escapes what follows it.
    structure = line.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_STRUCTURE)
    if structure.count(b'"') > 2 * MAX_NODES:
        return True
    return len(b"".join(structure.split(b'"')[::2])) >= MAX_NODES


def _replace_unpaired(match: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if match.group(2) is not None else match.group(0)


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number out of range: {text[:40]}")
    return number


def _depth_exceeds(value: Any, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit + 1):
        level = [child for parent in level for child in _children(parent) if isinstance(child, (dict, list))]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterable[Any]:
    return value.values() if _is_object(value) else value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decode = json.JSONDecoder(parse_float=_parse_finite, parse_constant=_refuse_constant).decode
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_encode_ascii = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode(value: Any) -> bytes:
    """Encode for the server: UTF-8; unpaired surrogates (from undecodable file names) become `?`."""
    return _encode(value).encode("utf-8", "replace")


def encode_ascii(value: Any) -> bytes:
    """Encode for a task's server: non-ASCII characters are escaped, so every string arrives unchanged."""
    return _encode_ascii(value).encode("ascii")
