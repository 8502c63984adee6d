"""The calls of a recorded episode as they are made again, by `replay` and by branches."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal, TypeAlias

import msgspec

from decathlon_mcp.episodes.call_log import NOT_KEPT_MESSAGE
from decathlon_mcp.errors import DecathlonError, failure_text
from decathlon_mcp.plugins.history.differences import ReplyText
from decathlon_mcp.storage.trajectory import CallLines, Trajectory
from decathlon_mcp.types import JsonObject, as_object, read_object

Missing: TypeAlias = Literal["cancelled", "unanswered", "not kept"]
"""Why there is no reply to compare with. `not kept`: the call has run, and its reply was too long to keep."""
_TOOL_FAILURES = frozenset({"driver_error", "call_timeout", "limit_exceeded"})
"""Codes of errors of this server that are the reply to a call, which its agent has read."""


class _Failure(msgspec.Struct, frozen=True):
    code: str = ""
    message: str = ""
    data: msgspec.Raw = msgspec.Raw(b"{}")


class _Reply(msgspec.Struct, frozen=True):
    """The line `reply`, of which a result is skipped."""

    failure: _Failure | None = None


_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_READ_MEMBERS = frozenset({"seq", "server", "tool", "failed", "seconds"})


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call that was sent. `reply`: None if it is `missing`. `overlaps`: another call ran meanwhile."""

    seq: int
    name: str
    arguments: JsonObject | None
    meta: JsonObject | None
    reply: ReplyText | None
    missing: Missing | None
    overlaps: bool


def recorded_calls(trajectory: Trajectory, last: int | None = None) -> Iterator[RecordedCall]:
    """The calls that were sent, up to this number; each is read when it is asked for. Raises OSError."""
    newest_reply = 0.0
    for lines, following in pairwise(chain(trajectory.sent_calls(), (None,))):
        if lines is None or (last is not None and lines.seq > last):
            return
        next_at = math.inf if following is None else following.call_at
        overlaps = newest_reply > lines.call_at or lines.reply_at > next_at
        if lines.reply:
            newest_reply = max(newest_reply, lines.reply_at)
        if not (call := read_object(lines.call)):
            continue
        reply, missing = _read_reply(lines.reply)
        yield RecordedCall(
            seq=lines.seq,
            name=str(call.get("name")),
            arguments=as_object(call.get("arguments")),
            meta=as_object(call.get("meta")),
            reply=reply,
            missing=missing,
            overlaps=overlaps,
        )


def raw_members(lines: CallLines) -> tuple[JsonObject, JsonObject]:
    """Both lines of a call, whose long members are `msgspec.Raw`."""
    return _members(lines.call), _members(lines.reply)


def _members(line: bytes) -> JsonObject:
    """The members of a line as they are, but for those that are needed."""
    try:
        members: JsonObject = _decode_members(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # Lone surrogates, which Python's decoder takes, and its encoder escapes.
        values = read_object(line) or {}
        members = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in values.items()}
    return {
        name: json.loads(bytes(value)) if name in _READ_MEMBERS else value for name, value in members.items()
    }


def why_missing(line: bytes) -> Missing | None:
    """Why the line of a reply has none that can be compared; None if it has one."""
    if not line.endswith(b"\n"):
        return "unanswered"
    try:
        failure = _decode_reply(line).failure
    except (msgspec.MsgspecError, ValueError, RecursionError):
        failure = None  # a result with lone surrogates
    if failure is None:
        return None
    if failure.code not in _TOOL_FAILURES:
        return "unanswered"
    if failure.message == NOT_KEPT_MESSAGE:
        return "not kept"
    return "cancelled" if (read_object(bytes(failure.data)) or {}).get("reason") == "cancelled" else None


def _read_reply(line: bytes) -> tuple[ReplyText | None, Missing | None]:
    if (missing := why_missing(line)) is not None:
        return None, missing
    reply = read_object(line) or {}
    if (result := as_object(reply.get("result"))) is not None:
        return ReplyText.of_result(result), None
    if (failure := as_object(reply.get("failure"))) is not None:
        error = DecathlonError(str(failure.get("message")), **(as_object(failure.get("data")) or {}))
        return ReplyText.of_error(failure_text(error)), None
    if (fault := as_object(reply.get("error"))) is not None:
        return ReplyText.of_error(str(fault.get("message"))), None
    return None, "unanswered"
