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
