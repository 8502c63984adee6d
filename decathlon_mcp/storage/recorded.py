"""A recorded episode to be played again: its calls with their replies, in the order of their numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from decathlon_mcp.differences import ReplyText
from decathlon_mcp.errors import BadRequestError, DecathlonError, failure_text
from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.storage.logged_calls import NOT_KEPT, NOT_KEPT_MESSAGE, Positions, read_calls
from decathlon_mcp.storage.trajectory import raw_line, read_line
from decathlon_mcp.types import JsonObject, as_object, read_object

Missing: TypeAlias = Literal["cancelled", "unanswered", "not kept"]
"""Why there is no reply to compare with. `not kept`: the call has run, and its reply was too long to keep."""
PREFIX_BYTES = 256
"""Beginning of a line `reply` that has its short members."""
_SECONDS = re.compile(rb',"seconds":(\d+(?:\.\d+)?)[,}]')
_EVENTS = ("start", "ready", "claim")
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
_READ_MEMBERS = frozenset({"seq", "server", "tool", "failed"})


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


class RecordedEpisode:
    """The trajectory of an episode, which may still play. All methods block, and raise OSError.

    `head`, `ready`, `claim`: its lines of these kinds; empty if there is none. `last`: the highest number of
    a call. Making one reads the file once: up to a second for 256 MiB.
    """

    def __init__(self, trajectory: Path) -> None:
        self._file = trajectory
        self._lines: dict[str, bytes] = {}
        self._claimed_at: int | None = None
        with open_regular(trajectory) as lines:
            logged = read_calls(self._noted(lines))
        self.last = logged.last
        # Only those that were sent; the others did nothing.
        self._positions = [(seq, at) for seq, at in enumerate(logged.positions, 1) if at.call != NOT_KEPT]
        self.head, self.ready, self.claim = (
            read_object(self._lines.get(event, b"")) or {} for event in _EVENTS
        )

    def _noted(self, lines: Iterable[bytes]) -> Generator[bytes]:
        position = 0
        for line in lines:
            for event in _EVENTS:
                if line.startswith(b'{"event":"%s"' % event.encode()):
                    self._lines.setdefault(event, line)
                    if event == "claim" and self._claimed_at is None:
                        self._claimed_at = position
            position += len(line)
            yield line

    @property
    def count(self) -> int:
        """How many calls were sent."""
        return len(self._positions)

    def seconds(self, last: int) -> float:
        """How long the calls up to this number took, one after the other."""
        total = 0.0
        with open_regular(self._file) as lines:
            for seq, at in self._positions:
                if seq <= last and at.reply != NOT_KEPT:
                    lines.seek(at.reply)
                    total += _seconds(lines.readline(PREFIX_BYTES))
        return total

    def calls(self, last: int | None = None) -> Iterator[RecordedCall]:
        """The calls that were sent, up to this number; each is read when it is asked for."""
        newest_reply = 0
        with open_regular(self._file) as lines:
            for index, (seq, at) in enumerate(self._positions):
                if last is not None and seq > last:
                    return
                following = self._positions[index + 1][1].call if index + 1 < len(self._positions) else None
                overlaps = newest_reply > at.call or (following is not None and _end(at) > following)
                newest_reply = max(newest_reply, at.reply)
                if not (call := read_line(lines, at.call)):
                    continue
                reply, missing = _read_reply(raw_line(lines, at.reply))
                yield RecordedCall(
                    seq=seq,
                    name=str(call.get("name")),
                    arguments=as_object(call.get("arguments")),
                    meta=as_object(call.get("meta")),
                    reply=reply,
                    missing=missing,
                    overlaps=overlaps,
                )

    def lines(self, last: int) -> Iterator[tuple[JsonObject, JsonObject]]:
        """Both lines of the calls that were sent, up to this number. Long members are `msgspec.Raw`."""
        with open_regular(self._file) as lines:
            for seq, at in self._positions:
                if seq <= last and at.reply != NOT_KEPT:
                    yield _members(raw_line(lines, at.call)), _members(raw_line(lines, at.reply))

    def require_state_after(self, last: int) -> None:
        """Check that the episode stood still after this call, in a state to which its calls lead.

        Raises BadRequestError.
        """
        if last > self.last:
            raise BadRequestError(
                f"there is no call {last} to branch after: the episode has {self.last} until now"
            )
        before = [(seq, at) for seq, at in self._positions if seq <= last]
        following = min((at.call for seq, at in self._positions if seq > last), default=None)
        with open_regular(self._file) as lines:
            for seq, at in before:
                if (missing := _why_missing(raw_line(lines, at.reply))) is not None:
                    why = "was cancelled" if missing == "cancelled" else "has no reply that could be compared"
                    raise BadRequestError(f"no branch after call {last}: call {seq} {why}; branch before it")
                if self._claimed_at is not None and at.reply > self._claimed_at:
                    raise BadRequestError(f"no branch after call {last}: call {seq} ended after the claim")
                if following is not None and at.reply > following:
                    raise BadRequestError(
                        f"no branch after call {last}: call {seq} still ran when a later one was sent; "
                        "branch after a call at whose end no other ran"
                    )


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


def _seconds(prefix: bytes) -> float:
    """`seconds` of a reply, which stands before its long member."""
    found = _SECONDS.search(prefix)
    return float(found[1]) if found else 0.0


def _end(at: Positions) -> float:
    return float("inf") if at.reply == NOT_KEPT else at.reply


def _why_missing(line: bytes) -> Missing | None:
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
    if (missing := _why_missing(line)) is not None:
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
