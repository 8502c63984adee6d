"""Deletes the folders of episodes that ended long ago, and lists of tools that no other episode has."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.plugins.settings import RetentionSettings
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.disk import NotRegularError, open_regular
from decathlon_mcp.storage.kept_files import RESERVED_FILE
from decathlon_mcp.storage.kept_tools import FOLDER
from decathlon_mcp.storage.store import ENDED, Store
from decathlon_mcp.storage.trajectory import TRAJECTORY_FILE, event_of, find_lines
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import public_id, read_object

MAX_PER_ROUND = 500
"""Episodes that one round deletes, so that it takes seconds at most."""
ROUND_SECONDS = 3600.0
"""Time between two rounds."""
DAY_SECONDS = 86_400.0
UNFINISHED_SECONDS = 7 * DAY_SECONDS
"""Age at which a folder that nobody has closed counts as finished; no episode takes as long."""
_OLD = (
    "SELECT id FROM episodes WHERE ended_at IS NOT NULL AND has_files AND ended_at < ? AND NOT pinned"
    " ORDER BY ended_at LIMIT ?"
)
_FORGET_FILES = (
    "UPDATE episodes SET has_files = 0, operation = NULL, verdict = NULL, spec = '{}', progress = '{}'"
    " WHERE id = ? AND phase = ?"
)

RECENT_SECONDS = 3600.0
"""A list that was used so recently may be named by a line that is about to be written."""

log = logging.getLogger("decathlon.observe")


def create(settings: Settings, store: Store) -> Callable[[], Awaitable[None]] | None:
    """What a server with these settings runs beside its episodes; None without `--keep-days`."""
    keep_days = settings.of(RetentionSettings).keep_days
    return None if keep_days is None else partial(_delete_for_ever, store, settings.state, keep_days)


async def _delete_for_ever(store: Store, state: Path, keep_days: float) -> None:
    while True:
        try:
            await delete_old_episodes(store, state / "episodes", keep_days)
            before = time.time() - max(keep_days * DAY_SECONDS, RECENT_SECONDS)
            await anyio.to_thread.run_sync(remove_unnamed_tools, state, before)
        except DecathlonError as error:
            log.warning("old episodes could not be deleted", extra=fields(why=error.message))
        await anyio.sleep(ROUND_SECONDS)


async def delete_old_episodes(
    store: Store, folder: Path, keep_days: float, *, limit: int = MAX_PER_ROUND
) -> int:
    """Delete the files of episodes that ended more than `keep_days` ago; returns the number of episodes.

    The numbers and labels of an episode stay in its row, so that runs keep theirs. Pinned episodes keep all.
    `folder`: has a folder for each episode. Folders that the store does not know (of `stdio`) are as old as
    their newest file. At most `limit` are deleted, the oldest rows first. What cannot be deleted is logged
    and tried again by the next call. Links are removed, never followed.
    """
    before = time.time() - keep_days * DAY_SECONDS
    deleted = 0
    for (handle,) in store.query(_OLD, before, limit):
        # The folder first: after a crash in between, the row brings the next round here again.
        if await anyio.to_thread.run_sync(delete_folder, folder, handle):
            store.write((_FORGET_FILES, (handle, ENDED)))
            deleted += 1
    if deleted < limit:
        deleted += await anyio.to_thread.run_sync(_delete_unknown, folder, before, limit - deleted)
    if deleted:
        log.info("deleted the files of old episodes", extra=fields(episodes=deleted, keep_days=keep_days))
    return deleted


def delete_folder(folder: Path, handle: str) -> bool:
    """Delete the folder of one episode; whether it is gone. A disk that fails is logged. Blocks."""
    target = folder / handle
    if target.parent != folder or handle in ("", ".", ".."):
        return False  # not the name of a folder in this folder
    try:
        if target.is_symlink():
            target.unlink()
        else:
            shutil.rmtree(target)
    except FileNotFoundError:
        pass
    except OSError as error:
        why = fields(episode=public_id(handle), why=error.strerror)
        log.warning("the files of an episode could not be deleted", extra=why)
        return False
    return True


def _delete_unknown(folder: Path, before: float, limit: int) -> int:
    """Delete folders of that age that the store does not know; returns their number."""
    # Read here and not on the event loop: it may know a hundred thousand.
    with Store.open_read_only(folder.parent) as store:
        known = set[str]() if store is None else {row[0] for row in store.query("SELECT id FROM episodes")}
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return 0
    deleted = 0
    for name in names:
        if deleted < limit and name not in known and _ended_before(folder / name, before):
            deleted += delete_folder(folder, name)
    return deleted


def _ended_before(folder: Path, before: float) -> bool:
    """Whether the folder's files are all older than that; by UNFINISHED_SECONDS more if it is still open."""
    try:
        with os.scandir(folder) as entries:
            times = {entry.name: entry.stat(follow_symlinks=False).st_mtime for entry in entries}
        newest = max([folder.stat().st_mtime, *times.values()])
    except OSError:
        return False
    return newest < before - (UNFINISHED_SECONDS if RESERVED_FILE in times else 0)


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
    removed = 0
    for file in old:
        with suppress(FileNotFoundError):
            # Looked at again: an episode may have begun with this list while the trajectories were read.
            if file.stem not in named and file.stat().st_mtime < before:
                removed += 1
                if not dry_run:
                    file.unlink()
    return removed


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
