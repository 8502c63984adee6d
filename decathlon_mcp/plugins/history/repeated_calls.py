"""Recorded calls as replays and branches make them again, and how two replies to one call differ.

Content and `isError` are compared, and nothing else. A difference has a class: `time` if only times and
durations differ, `identifier` if only these and random names (hashes, UUIDs, numbers of records) do, and
`other` for everything else.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal, TypeAlias, cast

import msgspec

from decathlon_mcp.episodes.call import NOT_KEPT_MESSAGE
from decathlon_mcp.errors import DecathlonError, failure_text
from decathlon_mcp.storage.trajectory import CallLines, Trajectory
from decathlon_mcp.types import JsonObject, as_object, read_object

Kind: TypeAlias = Literal["time", "identifier", "other"]
PART_CHARACTERS = 400
"""Longest differing part that is quoted."""
MAX_CLASSIFIED_CHARACTERS = 256 << 10
"""Longer replies that differ are `other`: to look at every word would take long."""
CONTEXT_CHARACTERS = 40
"""How far a differing part is extended to whole words."""

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?)?(?: ?(?:Z\b|UTC\b|[+-]\d\d:?\d\d\b))?"
    r"|\b\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[+-]\d{4}\b)?"
    r"|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)(?:[a-z]{3,6})?\b"
    rf"|\b{_MONTH} +\d{{1,2}}(?:,? \d{{4}})?\b|\b\d{{1,2}} {_MONTH}(?: \d{{4}})?\b"
    r"|\b(?:1[5-9]|2\d)\d{8}(?:\d{3}|\d{6})?(?:\.\d+)?\b"
    r"|\b\d+(?:\.\d+)? ?(?:ns|us|µs|ms|s|sec|secs|seconds|min|minutes)\b"
)
_WORD = re.compile(r"[A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)*")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_HEXADECIMAL = re.compile(r"[0-9a-f]{7,128}|[0-9A-F]{7,128}")
_RANDOM = re.compile(r"(?=[^0-9]*[0-9][^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9]{16,}")
_ID_NAME = re.compile(r"(?:^|.*_)id|.*Id|.*ID|commit|sha|oid|hash")
MIN_HEXADECIMAL = 7
"""Digits of the shortest commit hash that git prints."""
_TOOL_FAILURES = frozenset({"driver_error", "call_timeout", "limit_exceeded"})
"""Codes of errors of this server that are the reply to a call, which its agent has read."""
_READ_MEMBERS = frozenset({"seq", "server", "tool", "failed", "seconds"})


@dataclass(frozen=True, slots=True)
class ReplyText:
    """What is compared of a reply: each part of its content as text; parts that are no text as JSON."""

    is_error: bool
    parts: tuple[str, ...]

    @classmethod
    def of_result(cls, result: Mapping[str, Any]) -> ReplyText:
        """The text of the result of a `tools/call`."""
        content: Any = result.get("content")
        items = cast("list[object]", content) if isinstance(content, list) else []
        return cls(bool(result.get("isError")), tuple(map(_part, items)))

    @classmethod
    def of_error(cls, message: str) -> ReplyText:
        """The text of a call that has an error instead of a result."""
        return cls(is_error=True, parts=(message,))

    @property
    def text(self) -> str:
        return "\n".join(self.parts)

    def moved(self, paths: Paths | None) -> ReplyText:
        """The same reply with a sandbox's paths as they are in the other sandbox."""
        if paths is None:
            return self
        return ReplyText(self.is_error, tuple(paths.moved(part) for part in self.parts))


@dataclass(frozen=True, slots=True)
class Paths:
    """The root of two sandboxes that differs: only sandboxes without isolation have roots of their own."""

    old: str
    new: str

    @classmethod
    def of(cls, old: str, new: str) -> Paths | None:
        """None if there is nothing to replace."""
        return None if not old or not new or old == new else cls(old, new)

    def moved(self, value: Any) -> Any:
        """A JSON value in whose texts the new root stands for the old one."""
        if isinstance(value, str):
            return value.replace(self.old, self.new)
        if isinstance(value, list):
            return [self.moved(item) for item in cast("list[object]", value)]
        if (members := as_object(value)) is not None:
            return {name: self.moved(member) for name, member in members.items()}
        return value


@dataclass(frozen=True, slots=True)
class Difference:
    """Two replies that differ. `old_part`, `new_part`: from the first to the last character that differs.

    The parts are cut to PART_CHARACTERS. `changed`: the identifiers of the old reply that the new one lacks.
    """

    kind: Kind
    old: ReplyText
    new: ReplyText
    old_part: str
    new_part: str
    changed: frozenset[str]

    def __str__(self) -> str:
        states = ""
        if self.old.is_error is not self.new.is_error:
            states = "an error now; " if self.new.is_error else "no error any more; "
        return f"{states}{self.kind}: {self.old_part!r} before, {self.new_part!r} now"

    def to_json(self) -> JsonObject:
        """The class, and the two differing parts."""
        return {"class": self.kind, "old": self.old_part, "new": self.new_part}


def compare_replies(old: ReplyText, new: ReplyText, paths: Paths | None = None) -> Difference | None:
    """The difference of two replies; None if they are equal. `paths`: what the old one is read with.

    Replies that are equal take no time. Others are read once, in up to 50 ms.
    """
    old = old.moved(paths)
    if old == new:
        return None
    a, b = old.text, new.text
    old_part, new_part = _differing(a, b)
    if max(len(a), len(b)) > MAX_CLASSIFIED_CHARACTERS:
        return Difference("other", old, new, old_part, new_part, frozenset())
    kind, changed = _classify(a, b)
    if old.is_error is not new.is_error or len(old.parts) != len(new.parts):
        kind = "other"
    return Difference(kind, old, new, old_part, new_part, frozenset(changed))


def changed_in(arguments: object, changed: Iterable[str]) -> list[str]:
    """The identifiers in a call's arguments that have changed, or begin like a changed identifier."""
    if not (known := set(changed)):
        return []
    words = {match[0] for match in _WORD.finditer(json.dumps(arguments, ensure_ascii=False))}
    # Sorted and looked up: thousands of words and of identifiers would be millions of pairs.
    ordered = sorted(one for one in known if len(one) >= MIN_HEXADECIMAL)

    def begins_alike(word: str) -> bool:
        if not _HEXADECIMAL.fullmatch(word):
            return False
        place = bisect_left(ordered, word)
        is_beginning = place < len(ordered) and ordered[place].startswith(word)
        return is_beginning or any(word[:end] in known for end in range(MIN_HEXADECIMAL, len(word)))

    return sorted(word for word in words if word in known or begins_alike(word))


def _part(item: object) -> str:
    part = as_object(item) or {}
    text = part.get("text")
    if part.get("type") == "text" and isinstance(text, str):
        return text
    return json.dumps(item, sort_keys=True, ensure_ascii=False)


def _classify(a: str, b: str) -> tuple[Kind, set[str]]:
    """The class of two different texts, and the identifiers of the first that the second lacks."""
    timeless_a, timeless_b = _TIME.sub("\0", a), _TIME.sub("\0", b)
    words_a, words_b = _WORD.findall(timeless_a), _WORD.findall(timeless_b)
    gone = {word for word in words_a if _is_identifier(word)}.difference(words_b)
    if timeless_a == timeless_b:
        return "time", set()
    if len(words_a) != len(words_b) or _WORD.split(timeless_a) != _WORD.split(timeless_b):
        return "other", gone
    kind: Kind = "identifier"
    before = ""
    for old, new in zip(words_a, words_b, strict=True):
        if old != new:
            if _is_same_kind(old, new) or (
                old.isdecimal() and new.isdecimal() and _ID_NAME.fullmatch(before)
            ):
                gone.add(old)
            else:
                kind = "other"
        before = old
    return kind, gone


def _is_identifier(word: str) -> bool:
    """Whether a word looks random: a UUID, a hash, or a long mixture of letters and digits."""
    if _UUID.fullmatch(word):
        return True
    if _HEXADECIMAL.fullmatch(word):
        return not word.isdecimal() and not word.isalpha()
    return _RANDOM.fullmatch(word) is not None


def _is_same_kind(old: str, new: str) -> bool:
    """Whether one identifier took the other's place."""
    # Of a thousand short hashes, thirty have no letter.
    both_hexadecimal = len(old) == len(new) and bool(
        _HEXADECIMAL.fullmatch(old) and _HEXADECIMAL.fullmatch(new)
    )
    if both_hexadecimal:
        return _is_identifier(old) or _is_identifier(new)
    return _is_identifier(old) and _is_identifier(new)


def _differing(a: str, b: str) -> tuple[str, str]:
    """The parts of two texts between what they have in common at both ends, as whole words."""
    start = _common(a, b)
    end = _common(a[start:][::-1], b[start:][::-1])
    for _ in range(CONTEXT_CHARACTERS):
        start -= _is_inside(a, start) or _is_inside(b, start)
        end -= _is_inside(a, len(a) - end) or _is_inside(b, len(b) - end)
    return _cut(a[start : len(a) - end]), _cut(b[start : len(b) - end])


def _is_inside(text: str, place: int) -> bool:
    """Whether a place in a text is inside of a word."""
    return 0 < place < len(text) and text[place - 1].isalnum() and text[place].isalnum()


def _common(a: str, b: str) -> int:
    """Length of the beginning that two texts share."""
    low, high = 0, min(len(a), len(b))
    # Slices are compared in C; character by character takes a second for some megabytes.
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(text: str) -> str:
    return text if len(text) <= PART_CHARACTERS else f"{text[:PART_CHARACTERS]}…"


Missing: TypeAlias = Literal["cancelled", "unanswered", "not kept"]
"""Why there is no reply to compare with. `not kept`: the call has run, and its reply was too long to keep."""


class _Failure(msgspec.Struct, frozen=True):
    code: str = ""
    message: str = ""
    data: msgspec.Raw = msgspec.Raw(b"{}")


class _Reply(msgspec.Struct, frozen=True):
    """The line `reply`, of which a result is skipped."""

    failure: _Failure | None = None


_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call that was sent."""

    seq: int
    name: str
    arguments: JsonObject | None
    meta: JsonObject | None
    reply: ReplyText | None
    missing: Missing | None
    overlaps: bool
    """Whether another call ran meanwhile."""


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
    """The members of a line as they are, except for decoded members."""
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
