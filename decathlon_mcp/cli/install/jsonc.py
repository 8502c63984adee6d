"""A JSON text with the places of its parts, so that one member can be changed and the rest stays as it is.

Comments and a comma behind the last member are read where the text's owner reads them (JSONC).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SPACE = re.compile(r"[ \t\r\n]*")
STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"', re.DOTALL)
SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
BOM = "\ufeff"


class NotJsonError(Exception):
    """The text is not JSON; the message says where and what was expected."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an object; `comma` is where the comma behind it stands, if one does."""

    name: str
    start: int
    value: Node
    comma: int | None


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it stands; `members` are an object's."""

    start: int
    end: int
    value: Any
    members: tuple[Member, ...] | None = None

    def member(self, name: str) -> Member | None:
        return next((member for member in self.members or () if member.name == name), None)


def parse(text: str, *, comments: bool) -> Node:
    """The text's one value. Raises NotJsonError."""
    reader = _Reader(text, comments=comments)
    start = reader.space(1 if text.startswith(BOM) else 0)
    node = reader.value(start)
    if (rest := reader.space(node.end)) != len(text):
        raise reader.fault(rest, "the end")
    return node


class _Reader:
    def __init__(self, text: str, *, comments: bool) -> None:
        self._text = text
        self._comments = comments

    def fault(self, at: int, expected: str) -> NotJsonError:
        line = self._text.count("\n", 0, at) + 1
        column = at - self._text.rfind("\n", 0, at)
        return NotJsonError(f"line {line}, column {column}: expected {expected}")

    def space(self, at: int) -> int:
        """Where what is no space, and no comment, begins."""
        while True:
            at = _end(SPACE, self._text, at)
            found = COMMENT.match(self._text, at) if self._comments else None
            if found is None:
                return at
            at = found.end()

    def value(self, at: int) -> Node:
        match self._text[at : at + 1]:
            case "{":
                return self._object(at)
            case "[":
                return self._array(at)
            case '"':
                end, value = self._string(at)
                return Node(at, end, value)
            case _:
                end = _end(SCALAR, self._text, at)
                if end == at:
                    raise self.fault(at, "a value")
                return Node(at, end, json.loads(self._text[at:end]))

    def _string(self, at: int) -> tuple[int, str]:
        end = _end(STRING, self._text, at)
        try:
            return end, json.loads(self._text[at:end])
        except ValueError:
            raise self.fault(at, "a string") from None

    def _object(self, start: int) -> Node:
        members: list[Member] = []
        for at in self._items(start, "}"):
            if any(member.comma is None for member in members):
                raise self.fault(at, "a comma")
            name_end, name = self._string(at)
            colon = self.space(name_end)
            if self._text[colon : colon + 1] != ":":
                raise self.fault(colon, "a colon")
            if any(member.name == name for member in members):
                raise self.fault(at, f"{name!r} to be there once")
            value = self.value(self.space(colon + 1))
            self._at, comma = self._comma(value.end)
            members.append(Member(name, at, value, comma))
        self._check_last(members[-1].comma if members else None)
        return Node(
            start, self._at + 1, {member.name: member.value.value for member in members}, tuple(members)
        )

    def _array(self, start: int) -> Node:
        values: list[Any] = []
        comma: int | None = start
        for at in self._items(start, "]"):
            if comma is None:
                raise self.fault(at, "a comma")
            node = self.value(at)
            values.append(node.value)
            self._at, comma = self._comma(node.end)
        self._check_last(comma if values else None)
        return Node(start, self._at + 1, values)

    def _items(self, start: int, close: str) -> Iterator[int]:
        """Where each item begins; whoever takes one says in `_at` where it ended, with its comma."""
        self._at = start + 1
        while True:
            self._at = self.space(self._at)
            if self._text[self._at : self._at + 1] == close:
                return
            yield self._at

    def _comma(self, at: int) -> tuple[int, int | None]:
        found = self.space(at)
        return (found + 1, found) if self._text[found : found + 1] == "," else (at, None)

    def _check_last(self, comma: int | None) -> None:
        if comma is not None and not self._comments:
            raise self.fault(comma, "no comma behind the last")


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at
