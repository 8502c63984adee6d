"""The user that an image's processes run as, by the image's own tables of users and groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

PASSWD, GROUP = "/etc/passwd", "/etc/group"
TABLE_BYTES = 1 << 20
"""How much of a table is read."""
_ID_DIGITS = 10
"""Ids are 32-bit numbers."""


@dataclass(frozen=True, slots=True)
class SandboxUser:
    """The user that processes run as, inside. `home` is absolute."""

    user: int = 0
    group: int = 0
    home: PurePosixPath = field(default=PurePosixPath("/root"))


def find_user(text: str, passwd: bytes, group: bytes) -> SandboxUser:
    """What an image's USER means: a name or an id, optionally with a group. Unknown names are root.

    `passwd` and `group`: the first `TABLE_BYTES` of each table, empty if there is none.
    """
    name, _, group_name = text.partition(":")
    row = _find(_rows(passwd), name or "0")
    user_id = int(name) if _is_id(name) else int(row[2])
    group_id = int(row[3]) if _is_id(row[3]) else 0
    if group_name:
        group_id = int(group_name) if _is_id(group_name) else int(_find(_rows(group), group_name)[2])
    home = PurePosixPath(row[5] if len(row) > 5 else "")
    if not home.is_absolute() or ".." in home.parts or len(home.parts) < 2:
        home = PurePosixPath("/root" if user_id == 0 else "/home/user")
    return SandboxUser(user_id, group_id, home)


def _find(rows: Sequence[Sequence[str]], name_or_id: str) -> Sequence[str]:
    """The first row with that name, else the first with that id; root's ids if there is none."""
    for column in (0, 2):
        for row in rows:
            if row[column] == name_or_id:
                return row
    return ("", "", "0", "0")


def _rows(table: bytes) -> list[list[str]]:
    """Valid lines of a table, split at colons."""
    rows = [line.split(":") for line in table.decode("utf-8", "replace").splitlines()]
    return [row for row in rows if len(row) >= 4 and _is_id(row[2])]


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _ID_DIGITS
