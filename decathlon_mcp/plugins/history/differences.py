"""Compares the replies of a tool to one call that was made twice, for replays and branches.

Content and `isError` are compared, and nothing else. A difference has a class: `time` if only times and
durations differ, `identifier` if only these and random names (hashes, UUIDs, numbers of records) do, and
`other` for everything else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from decathlon_mcp.types import JsonObject, as_object

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
    """The identifiers in a call's arguments that have changed, or that begin like one that has."""
    if not (known := set(changed)):
        return []
    words = {match[0] for match in _WORD.finditer(json.dumps(arguments, ensure_ascii=False))}
    return sorted(
        word
        for word in words
        if word in known
        or (
            _HEXADECIMAL.fullmatch(word)
            and any(
                one.startswith(word) or word.startswith(one) for one in known if len(one) >= MIN_HEXADECIMAL
            )
        )
    )


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
