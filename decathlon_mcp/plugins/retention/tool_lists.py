"""Removes lists of tools that no episode names any more."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from decathlon_mcp.storage.disk import NotRegularError, open_regular
from decathlon_mcp.storage.kept_tools import FOLDER
from decathlon_mcp.storage.trajectory import TRAJECTORY_FILE, event_of, find_lines
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import read_object

RECENT_SECONDS = 3600.0
"""A list that was used so recently may be named by a line that is about to be written."""

log = logging.getLogger("decathlon.storage")


def remove_unnamed_tools(state: Path, before: float, *, dry_run: bool = False) -> int:
    """Remove the lists that no trajectory names and nobody has used since `before`; returns their number.

    `before`: Unix seconds. Blocks: reads the beginning of every trajectory if there is a list so old.
    """
    try:
        with os.scandir(state / FOLDER) as entries:
            old = [Path(entry.path) for entry in entries if entry.stat().st_mtime < before]
        folders = (state / "episodes").iterdir() if old else ()
        named = {digest for folder in folders for digest in _ready_digests(folder)}
    except FileNotFoundError:
        return 0
    except OSError as error:
        # What cannot be read may name any of them.
        log.warning("lists of tools are not removed", extra=fields(why=error.strerror))
        return 0
    unnamed = [file for file in old if file.stem not in named]
    if not dry_run:
        for file in unnamed:
            file.unlink(missing_ok=True)
    return len(unnamed)


def _ready_digests(folder: Path) -> Iterator[str]:
    """The digests that an episode's trajectory names; a set-up that started over has several."""
    with (
        suppress(FileNotFoundError, NotADirectoryError, NotRegularError),
        open_regular(folder / TRAJECTORY_FILE) as lines,
    ):
        for _, _, line in find_lines(lines, whole=("ready",)):
            event = event_of(line)
            if event == "call":
                return  # nothing was sent before the episode was ready
            if event == "ready":
                yield str((read_object(line) or {}).get("tools"))
