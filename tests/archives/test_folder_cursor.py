"""Moving through folders by descriptors."""

from __future__ import annotations

import os
from pathlib import Path

from decathlon_mcp.archives.folder_cursor import FolderCursor

LEVELS = 40
"""Deeper than the folders whose descriptors are kept open."""


def test_every_folder_is_reached_from_every_other_at_any_depth(tmp_path: Path) -> None:
    deep = tuple(f"level-{number}" for number in range(LEVELS))
    places = [
        (),
        *((*deep[:depth], name) for depth in (1, 30, 31, 32, 33, LEVELS) for name in ("one", "two")),
    ]
    with FolderCursor(tmp_path, creates=True) as cursor:
        for start in places:
            for end in places:
                cursor.enter(start)
                found = os.fstat(cursor.enter(end))
                assert os.path.samestat(found, tmp_path.joinpath(*end).stat()), (start, end)


def test_folder_that_is_moved_meanwhile_leads_nowhere_else(tmp_path: Path) -> None:
    deep = tuple("d" * LEVELS)
    top = tmp_path / "top"
    (tmp_path / "elsewhere" / "sibling").mkdir(parents=True)
    with FolderCursor(top.parent, creates=True) as cursor:
        cursor.enter(("top", *deep, "one"))
        sibling = os.fstat(cursor.enter(("top", *deep, "sibling")))
        moved = top.joinpath(*deep, "sibling").rename(tmp_path / "elsewhere" / "moved")
        # Its `..` is another folder now, which has a folder of that name too.
        found = os.fstat(cursor.enter(("top", *deep, "one")))
        assert os.path.samestat(sibling, moved.stat())
        assert os.path.samestat(found, top.joinpath(*deep, "one").stat())
