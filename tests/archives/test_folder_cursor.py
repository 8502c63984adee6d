"""Moving through folders by descriptors."""

from __future__ import annotations

import os
from pathlib import Path

from decathlon_mcp.archives.folder_cursor import FolderCursor

LEVELS = 40
"""Deeper than the folders whose descriptors are kept open."""


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
