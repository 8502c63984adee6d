"""Changing one member of a JSON text, as somebody would who minds how the text is laid out."""

from __future__ import annotations

import json
from typing import Any

from decathlon_mcp.cli.install.jsonc import Member, Node, NotJsonError, parse

INDENT = "  "


class Text:
    """A JSON text whose root is an object. Raises NotJsonError where it is none."""

    def __init__(self, text: str, *, comments: bool) -> None:
        self.text = text if text.strip("\ufeff \t\r\n") else text + "{}\n"
        self._comments = comments
        self.root = parse(self.text, comments=comments)
        if self.root.members is None:
            raise NotJsonError("the whole of it is no object")

    @property
    def value(self) -> Any:
        return self.root.value

    def get(self, *path: str) -> Node | None:
        """The value at a path of names, if there is one. Raises NotJsonError for a way through no object."""
        node: Node | None = self.root
        for name in path:
            if node is None:
                return None
            if node.members is None:
                raise NotJsonError(f"what {path[0]!r} holds is no object")
            member = node.member(name)
            node = member.value if member else None
        return node

    def with_member(self, path: tuple[str, str], value: Any) -> Text:
        """The text where that member of that object is `value`; both are made where they are not there."""
        key, name = path
        if (found := self.get(key, name)) is not None:
            indent = None if self._is_one_line(self.root) else self._indent_at(found.start)
            return self._cut(found.start, found.end, self._dumped(value, indent))
        if (holder := self.get(key)) is not None:
            return self._added(holder, name, value)
        return self._added(self.root, key, {name: value})

    def without_member(self, *path: str) -> Text:
        """The text where there is no such member."""
        *way, name = path
        holder = self.get(*way)
        member = holder.member(name) if holder else None
        if holder is None or member is None:
            return self
        return self._removed(holder, member)

    def _added(self, holder: Node, name: str, value: Any) -> Text:
        """Behind the last member, with a comma behind what was the last."""
        members = holder.members or ()
        one_line = self._is_one_line(holder)
        indent = self._indent_of(holder)
        said = f"{json.dumps(name, ensure_ascii=False)}: {self._dumped(value, None if one_line else indent)}"
        close = holder.end - 1
        at = len(self.text[:close].rstrip())
        if one_line:
            added = f" {said}" if members else said
        else:
            outer = "" if members else self._newline + self._indent_at(holder.start)
            added = self._newline + indent + said + outer
        last = members[-1] if members else None
        if last is not None and last.comma is not None:
            added += ","  # the text's own way: a comma behind the last
        result = self.text[:at] + added + self.text[at if members else close :]
        if last is not None and last.comma is None:
            result = result[: last.value.end] + "," + result[last.value.end :]
        return Text(result, comments=self._comments)

    def _is_one_line(self, holder: Node) -> bool:
        """Is this object, or the text around one that is empty, written without a line's end?"""
        if holder.members:
            return "\n" not in self.text[holder.start : holder.end]
        return bool(self.root.members) and "\n" not in self.text[self.root.start : self.root.end]

    def _removed(self, holder: Node, member: Member) -> Text:
        members = holder.members or ()
        place = members.index(member)
        start = len(self.text[: member.start].rstrip())
        end = member.value.end if member.comma is None else member.comma + 1
        if len(members) == 1 and not self.text[end : holder.end - 1].strip() and start == holder.start + 1:
            return self._cut(start, holder.end - 1, "")
        cut = self.text[:start] + self.text[end:]
        if place == len(members) - 1 and place and member.comma is None:
            comma = members[place - 1].comma
            assert comma is not None
            cut = cut[:comma] + cut[comma + 1 :]
        return Text(cut, comments=self._comments)

    def _cut(self, start: int, end: int, instead: str) -> Text:
        return Text(self.text[:start] + instead + self.text[end:], comments=self._comments)

    def _dumped(self, value: Any, indent: str | None) -> str:
        """A value as it stands at that depth; None: on one line."""
        if indent is None:
            return json.dumps(value, ensure_ascii=False)
        unit = self._unit()
        return json.dumps(value, ensure_ascii=False, indent=unit).replace("\n", self._newline + indent)

    def _indent_of(self, holder: Node) -> str:
        """Of the members of an object."""
        if holder.members and "\n" in self.text[holder.start : holder.members[0].start]:
            return self._indent_at(holder.members[0].start)
        return self._indent_at(holder.start) + self._unit()

    def _indent_at(self, at: int) -> str:
        """Of the line that something stands in."""
        line = self.text[self.text.rfind("\n", 0, at) + 1 : at]
        return line[: len(line) - len(line.lstrip(" \t"))]

    def _unit(self) -> str:
        """One step of the text's own indentation."""
        members = self.root.members or ()
        first = self._indent_at(members[0].start) if members else ""
        return first or INDENT

    @property
    def _newline(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"
