"""The messages of a driver: their envelopes, the limits on what is in them, and the errors that they report.

Nothing that a driver sends is trusted. Only the envelope of a message is decoded when it arrives: results and
parameters stay bytes until their limits have been checked.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import msgspec
from decathlon_sandbox import wire
from msgspec import UNSET, Raw, UnsetType

from decathlon_mcp.errors import CallTimeoutError, DriverError
from decathlon_mcp.json_limits import check_json
from decathlon_mcp.types import JsonObject, as_object

MAX_ERROR_CHARACTERS = 4000
MAX_ERROR_BYTES = 1 << 17
"""Longest error object of a driver that is read; a longer one loses its message and its data."""
MAX_SMALL_NODES = 1_000
"""Values and keys in an error, and in the result of a method without a limit of its own."""
MAX_NOTIFICATION_NODES = 10_000
MAX_DEPTH = 128
"""Depth of a result; the driver refuses replies of the task's servers that are deeper than 120."""

# The driver writes the id of a reply first. Used for long replies, and for lines that cannot be read.
_REPLY_ID = re.compile(rb'\{"jsonrpc":"2\.0","id":(\d{1,18}),')
_INTEGER = re.compile(rb"-?\d{1,18}")


class Message(msgspec.Struct, frozen=True):
    """The envelope of a message. `overlong` belongs to a reply that the driver has shortened."""

    id: Raw | UnsetType = UNSET
    method: str | UnsetType = UNSET
    params: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET
    overlong: Raw | UnsetType = UNSET


class Notification(msgspec.Struct, frozen=True):
    """A notification for one request, `wire.PROGRESS` or `wire.MESSAGE`. `params` is JSON."""

    method: str
    params: bytes

    def decoded(self) -> JsonObject | None:
        """Its params; None for what is no object, or exceeds a limit."""
        try:
            return as_object(decode_bounded(self.params, max_nodes=MAX_NOTIFICATION_NODES))
        except ValueError:
            return None


class _CallParams(msgspec.Struct, frozen=True):
    """The parameters of `progress` and `message`."""

    id: Raw | UnsetType = UNSET
    params: Raw | UnsetType = UNSET


_decode_message = msgspec.json.Decoder(Message).decode
_decode_call_params = msgspec.json.Decoder(_CallParams).decode
# A Raw is not checked for valid UTF-8 and msgspec's errors are no ValueErrors.
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


def read_message(payload: bytes) -> Message | None:
    """The envelope of a message; None for one that is no JSON object."""
    try:
        return _decode_message(payload)
    except _UNREADABLE:
        return None


def integer_id(value: Raw | UnsetType) -> int | None:
    """A message's id; None for one that no request has."""
    # Only an integer is an id that was sent: `true == 1` in Python, and 1.0 too.
    text = b"" if isinstance(value, UnsetType) else bytes(value)
    return int(text) if _INTEGER.fullmatch(text) else None


def reply_id(payload: bytes) -> int | None:
    """The id of a reply that is not decoded."""
    match = _REPLY_ID.match(payload)
    return None if match is None else int(match.group(1))


def read_notification(method: str, params: Raw) -> tuple[int, Notification] | None:
    """The request's id and the notification for it; None for what names no request."""
    try:
        outer = _decode_call_params(params)
    except _UNREADABLE:
        return None
    number = integer_id(outer.id)
    if number is None or isinstance(outer.params, UnsetType):
        return None
    return number, Notification(method, bytes(outer.params))


def decode_bounded(data: bytes | Raw, *, max_nodes: int = MAX_SMALL_NODES) -> Any:
    """Decode JSON with at most that many values and keys and at most MAX_DEPTH levels.

    Raises ValueError if it exceeds a limit (JsonLimitError) or is not valid.
    """
    data = bytes(data)
    check_json(data, max_depth=MAX_DEPTH, max_nodes=max_nodes)
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def raise_error(reply: Message) -> None:
    """Raise DriverError or CallTimeoutError for a reply that is not just a result."""
    if isinstance(reply.error, UnsetType):
        if isinstance(reply.result, UnsetType):
            raise DriverError("the driver sent a reply that cannot be read", reason="invalid_reply")
        return
    error: JsonObject = {}
    if len(raw := bytes(reply.error)) <= MAX_ERROR_BYTES:
        with suppress(ValueError):
            error = as_object(decode_bounded(raw)) or {}
    code, text, data = error.get("code"), error.get("message"), as_object(error.get("data"))
    # A bool is an int, and `true` would be code 1.
    reason = wire.REASONS.get(code, "driver_fault") if type(code) is int else "driver_fault"
    message = text[:MAX_ERROR_CHARACTERS] if isinstance(text, str) and text else reason
    if reason == "timeout":
        raise CallTimeoutError(message)
    raise DriverError(message, reason=reason, **({"about": data} if data else {}))
