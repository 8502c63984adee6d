"""Messages of a driver, of which only the envelope is decoded when one arrives.

A driver is not trusted: the depth and the number of values of what is decoded are bounded.
"""

from __future__ import annotations

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
"""Longest error object of a driver that is read; a longer error loses its message and its data."""
MAX_SMALL_NODES = 1_000
"""Values and keys in an error, and in the result of a method without a limit of its own."""
MAX_NOTIFICATION_NODES = 10_000
MAX_DEPTH = 128
"""Depth of a result; the driver refuses replies of the task's servers that are deeper than 120."""

NULL = Raw(b"null")


class Message(msgspec.Struct, frozen=True):
    """The envelope of a message."""

    id: Raw = NULL
    method: str = ""
    params: Raw = NULL
    result: Raw | UnsetType = UNSET
    error: Raw = NULL


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


class _CallNotification(msgspec.Struct, frozen=True):
    """The parameters of `progress` and `message`."""

    id: int
    params: Raw


_decode_message = msgspec.json.Decoder(Message).decode
_decode_notification = msgspec.json.Decoder(_CallNotification).decode
# A Raw is not checked for valid UTF-8 and msgspec's errors are no ValueErrors.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


def read_message(payload: bytes) -> Message:
    """The envelope of a message; empty if it is no JSON object."""
    try:
        return _decode_message(payload)
    except UNREADABLE:
        return Message()


def read_notification(message: Message) -> tuple[int, Notification]:
    """The id of the request that a notification is for, and the notification; id 0 if it cannot be read."""
    try:
        read = _decode_notification(message.params)
    except UNREADABLE:
        return 0, Notification(message.method, b"")
    return read.id, Notification(message.method, bytes(read.params))


def decode_bounded(data: bytes | Raw, kind: Any = Any, *, max_nodes: int = MAX_SMALL_NODES) -> Any:
    """Decode JSON of a kind with at most that many values and keys and at most MAX_DEPTH levels.

    Raises ValueError if it exceeds a limit (JsonLimitError) or is not valid.
    """
    data = bytes(data)
    check_json(data, max_depth=MAX_DEPTH, max_nodes=max_nodes)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def read_answer(payload: bytes) -> Message:
    """The message of a reply with a result. Raises DriverError or CallTimeoutError for any other."""
    reply = read_message(payload)
    if reply.error is NULL:
        if isinstance(reply.result, UnsetType):
            raise DriverError("the driver sent a reply that cannot be read", reason="invalid_reply")
        return reply
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
