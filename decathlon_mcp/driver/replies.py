"""Calls of the task's servers: their parameters, their replies and notifications, and what these must not
contain.

Arguments and results stay JSON text on their way through the server; only what the server needs is decoded.

A reply comes out of a sandbox. It may be anything, except for something that a client would take for this
server's own: keys of `_meta` with this server's prefix are removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import msgspec
from decathlon_sandbox import wire
from msgspec import UNSET, Raw, UnsetType

from decathlon_mcp.driver.driver_messages import NULL, UNREADABLE, Notification, decode_bounded, read_answer
from decathlon_mcp.driver.mcp_schema import (
    MAX_FAULT_CHARACTERS,
    LogParams,
    ProgressParams,
    decode_items,
    decode_members,
    read_result,
    readable_text,
    repaired_result,
    valid_notification,
)
from decathlon_mcp.errors import DriverError, LimitExceededError
from decathlon_mcp.json_limits import MAX_NODES, JsonLimitError
from decathlon_mcp.types import JsonObject, as_json, as_json_with_raw, as_object

REPLY_BYTES = 4 << 20
"""Longest reply of a tool's call. The driver keeps the limit, and a line of the stream is little longer."""
OWN_PREFIX = "decathlon/"
"""Prefix of this server's own keys in `_meta`."""
OVERLONG_FOLDER = ".overlong_tool_outputs"
"""Folder in the workspace where `handle_overlong_tool_outputs` looks for the full texts."""
OVERLONG_KEY = "decathlon/overlong"
"""Key in the `_meta` of a truncated result: the text's length in characters, and its path if it was saved."""
MAX_PATH_CHARACTERS = 4096


class CallParams(msgspec.Struct, frozen=True):
    """The parameters of a `tools/call` apart from the tool's name.

    `arguments`: JSON text of an object on one line, None if the client sent none.
    `meta`: the decoded `_meta`.
    """

    arguments: bytes | None = None
    meta: JsonObject = msgspec.field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, arguments: JsonObject | None, meta: JsonObject | None = None) -> CallParams:
        """Parameters whose arguments are decoded."""
        return cls(None if arguments is None else as_json(arguments), meta or {})

    def for_tool(self, tool: str) -> JsonObject:
        """The parameters as a task's server gets them, for `as_json_with_raw`."""
        params: JsonObject = {"name": tool}
        if self.arguments is not None:
            params["arguments"] = Raw(self.arguments)
        if self.meta:
            params["_meta"] = self.meta
        return params


class Reply(msgspec.Struct, frozen=True):
    """A task server's reply. Exactly one of `result` and `error` is set.

    `result`: JSON text of the result object on one line, as the server sent it, without what MCP does not
    allow and this server's own keys in its `_meta` and its content's; it keeps all limits of a reply.
    `error`: the JSON-RPC error. `is_error`: the result's `isError`. `meta`: the result's `_meta`; empty if
    that is no object.
    """

    result: bytes | None
    error: JsonObject | None = None
    is_error: bool = False
    meta: JsonObject = msgspec.field(default_factory=dict[str, Any])

    def decoded(self) -> JsonObject:
        """{"result": OBJECT} or {"error": OBJECT}."""
        if self.result is None:
            return {"error": self.error or {}}
        return {"result": msgspec.json.decode(self.result)}

    def result_with(self, members: JsonObject) -> bytes:
        """JSON text of the result with further or other members; all others are copied unchanged."""
        assert self.result is not None
        return as_json_with_raw({**decode_members(self.result), **members})

    @classmethod
    def from_result(cls, text: bytes | Raw, overlong: Raw | UnsetType = UNSET) -> Reply:
        """A reply with the result that this JSON text has. `overlong`: the driver's report of a long reply.

        What MCP does not allow in it is left out. Raises what `repaired_result` and `read_result` raise:
        `msgspec.ValidationError` for one of which nothing valid is left.
        """
        data = bytes(text)
        try:
            result = read_result(data)
        except msgspec.ValidationError:
            data = repaired_result(data)
            result = read_result(data)
        # Members are written again one by one, because of duplicates: parsers differ in which duplicate they
        # read, and an unchecked duplicate could have keys of this server.
        members, meta = decode_members(data), result.meta
        if result.has_metas:
            items = [_without_own_keys(item) for item in decode_items(members["content"])]
            members["content"] = Raw(as_json_with_raw(items))
        if meta or not isinstance(overlong, UnsetType):
            meta = without_own(meta)
            if not isinstance(overlong, UnsetType):
                meta = {**meta, **_read_overlong(overlong)}
            if meta is not result.meta:
                members["_meta"] = Raw(as_json(meta))
        relayed = as_json_with_raw(members)
        if b"\r" in relayed:
            # White space between tokens. In a stream of events it would end the line.
            relayed = relayed.replace(b"\r", b" ")
        return cls(relayed, is_error=result.is_error, meta=meta)


@dataclass(frozen=True, slots=True)
class Truncation:
    """How the driver shortens a result: its text to `characters`, with the whole text in `folder`.

    Without `folder`, what is cut off is dropped.
    """

    characters: int
    folder: PurePosixPath | None = None

    def to_json(self) -> JsonObject:
        folder: JsonObject = {} if self.folder is None else {"folder": str(self.folder)}
        return {**folder, "characters": self.characters}


class _Envelope(msgspec.Struct, frozen=True):
    """The envelope of a reply of a task's server."""

    result: Raw = NULL
    error: Raw = NULL


class _Response(msgspec.Struct, frozen=True):
    """The driver's response to a call. `overlong`: what the driver reports of a result that it shortened."""

    result: _Envelope
    error: Raw = NULL
    overlong: Raw | UnsetType = UNSET


class _Overlong(msgspec.Struct, frozen=True):
    """What the driver reports about a result that it has shortened."""

    path: str | None
    characters: int


_decode_response = msgspec.json.Decoder(_Response).decode
_decode_overlong = msgspec.json.Decoder(_Overlong).decode


def read_reply(payload: bytes, *, server: str) -> Reply:
    """The reply in the driver's response to a tool's call.

    Raises the driver's error, LimitExceededError for a reply that is too long, too deep or over
    `json_limits.MAX_NODES`, and DriverError with reason `server` for a reply that is neither a result nor an
    error, and for a tool's result of which nothing valid is left without what MCP does not allow: its message
    names the fault and has the result's text.
    """
    try:
        response = _decode_response(payload)
    except UNREADABLE:
        response = None
    if response is None or response.error is not NULL:
        _raise_driver_error(payload)
        raise _neither(server)
    reply = response.result
    try:
        if reply.error is not NULL:
            error = decode_bounded(reply.error, max_nodes=MAX_NODES)
            members = as_object(error) or {}
            # As the SDKs and the driver (`mcp_session.is_error`) read it.
            is_valid_error = type(members.get("code")) is int and isinstance(members.get("message"), str)
            if is_valid_error or (error is not None and bytes(reply.result) == b"null"):
                return Reply(None, members)
        if bytes(reply.result) != b"null":
            return Reply.from_result(reply.result, response.overlong)
    except JsonLimitError as error:
        raise LimitExceededError(f"the reply exceeds a limit: {error}") from None
    except msgspec.ValidationError as error:
        # An SDK client would raise for it.
        fault, text = str(error)[:MAX_FAULT_CHARACTERS], readable_text(bytes(reply.result))
        message = f"server {server} sent a result that is not MCP ({fault}); its text: {text}"
        raise DriverError(message, reason="server") from None
    except UNREADABLE:
        pass
    raise _neither(server)


def _raise_driver_error(payload: bytes) -> None:
    try:
        read_answer(payload)
    except DriverError as error:
        if error.data.get("reason") == "too_long":
            raise LimitExceededError(error.message, limit_bytes=REPLY_BYTES) from None
        raise


def _neither(server: str) -> DriverError:
    message = f"server {server} sent a reply that is neither a result nor an error"
    return DriverError(message, reason="server")


def relayed_notification(notification: Notification) -> tuple[bool, JsonObject] | None:
    """Whether a call's notification is progress (else a log message), and its params for the client.

    What MCP does not allow in them is left out, and keys that look like this server's own. None if a required
    member is faulty.
    """
    is_progress = notification.method == wire.PROGRESS
    params = notification.decoded()
    if params is not None:
        params = valid_notification(params, ProgressParams if is_progress else LogParams)
    return None if params is None else (is_progress, without_own_meta(params))


def without_own_meta(value: JsonObject) -> JsonObject:
    """A definition or the params of a notification without this server's keys in its `_meta`."""
    meta = as_object(value.get("_meta"))
    return value if meta is None else {**value, "_meta": without_own(meta)}


def without_own(meta: JsonObject) -> JsonObject:
    """The value of a `_meta` without this server's keys; the same object if there are none."""
    kept = {key: item for key, item in meta.items() if not key.casefold().startswith(OWN_PREFIX)}
    return kept if len(kept) < len(meta) else meta


def _without_own_keys(item: Raw) -> dict[str, Raw]:
    """The members of a content item, or of the resource in it, written again as a result's members are."""
    members: dict[str, Raw] = decode_members(item)
    if (resource := members.get("resource")) is not None and bytes(resource).startswith(b"{"):
        members["resource"] = Raw(as_json_with_raw(_without_own_keys(resource)))
    if (raw_meta := members.get("_meta")) is not None:
        meta = as_object(msgspec.json.decode(raw_meta)) or {}
        if (cleaned := without_own(meta)) is not meta:
            members["_meta"] = Raw(as_json(cleaned))
    return members


def _read_overlong(overlong: Raw) -> JsonObject:
    """The member of `_meta` that says where the whole text of a shortened result is, and its length.

    None of it if the driver sent nonsense.
    """
    try:
        report = _decode_overlong(overlong)
    except UNREADABLE:
        return {}
    path: JsonObject = {} if report.path is None else {"path": report.path[:MAX_PATH_CHARACTERS]}
    return {OVERLONG_KEY: {**path, "characters": report.characters}}
