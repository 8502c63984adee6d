"""Replies of the task's servers, as the driver relays them: their limits, and what they must not contain.

A reply comes out of a sandbox. It may be anything, except for something that a client would take for this
server's own: keys of `_meta` with this server's prefix are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType

from decathlon_mcp.driver_client.rpc import Message, decode_bounded
from decathlon_mcp.errors import DriverError, LimitExceededError
from decathlon_mcp.json_limits import MAX_NODES, JsonLimitError
from decathlon_mcp.suites.truncation import OVERLONG_KEY
from decathlon_mcp.types import JsonObject, as_object

OWN_PREFIX = "decathlon/"
"""Prefix of this server's own keys in `_meta`."""
MAX_PATH_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Cut:
    """How the driver shortens a result: its text to `characters`, with the whole text in `folder`."""

    folder: PurePosixPath
    characters: int

    def to_json(self) -> JsonObject:
        return {"folder": str(self.folder), "characters": self.characters}


class _Reply(msgspec.Struct, frozen=True):
    """The envelope of a reply of a task's server."""

    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class _Overlong(msgspec.Struct, frozen=True):
    """What the driver reports about a result that it has shortened."""

    path: str
    characters: int


_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_overlong = msgspec.json.Decoder(_Overlong).decode
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


def read_reply(message: Message, *, server: str, limit_bytes: int) -> JsonObject:
    """The reply in the driver's response to a `call`: {"result": OBJECT} or {"error": OBJECT}.

    Raises LimitExceededError for a reply over `limit_bytes`, over `json_limits.MAX_NODES` or too deep, and
    DriverError with reason `server` for one that is neither a result nor an error.
    """
    assert not isinstance(message.result, UnsetType)
    raw = bytes(message.result)
    if len(raw) > limit_bytes:
        raise LimitExceededError(
            f"the reply has {len(raw)} bytes, more than the limit of {limit_bytes} bytes",
            limit_bytes=limit_bytes,
        )
    invalid = DriverError(
        f"server {server} sent a reply that is neither a result nor an error", reason="server"
    )
    try:
        reply = _decode_reply(raw)
        if not isinstance(reply.error, UnsetType) and isinstance(reply.result, UnsetType):
            return {"error": as_object(decode_bounded(reply.error, max_nodes=MAX_NODES)) or {}}
        if isinstance(reply.result, UnsetType) or not isinstance(reply.error, UnsetType):
            raise invalid
        result = as_object(decode_bounded(reply.result, max_nodes=MAX_NODES))
    except JsonLimitError as error:
        raise LimitExceededError(f"the reply exceeds a limit: {error}") from None
    except _UNREADABLE:
        raise invalid from None
    if result is None:
        raise invalid
    return {"result": _with_overlong(without_own_keys(result), message.overlong)}


def without_own_keys(value: JsonObject) -> JsonObject:
    """A result, definition or notification without this server's keys in its `_meta` and its content's."""
    content = value.get("content")
    if isinstance(content, list):
        items = cast("list[Any]", content)
        if any("_meta" in item for item in items if isinstance(item, dict)):
            value = {**value, "content": _cleaned(items)}
    return _without_own_meta(value)


def _cleaned(items: Sequence[Any]) -> list[Any]:
    return [item if (known := as_object(item)) is None else _without_own_meta(known) for item in items]


def _without_own_meta(value: JsonObject) -> JsonObject:
    meta = as_object(value.get("_meta"))
    if meta is None or not any(_is_own(key) for key in meta):
        return value
    return {**value, "_meta": {key: item for key, item in meta.items() if not _is_own(key)}}


def _is_own(key: str) -> bool:
    return key.casefold().startswith(OWN_PREFIX)


def _with_overlong(result: JsonObject, overlong: Raw | UnsetType) -> JsonObject:
    """A result with the key that tells where the whole text of a shortened result is."""
    if isinstance(overlong, UnsetType):
        return result
    try:
        read = _decode_overlong(overlong)
    except _UNREADABLE:
        return result
    value = {"path": read.path[:MAX_PATH_CHARACTERS], "characters": read.characters}
    return {**result, "_meta": {**(as_object(result.get("_meta")) or {}), OVERLONG_KEY: value}}
