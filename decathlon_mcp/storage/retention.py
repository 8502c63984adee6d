"""Deletes files of episodes: of those that ended long ago, if the operator set `--keep-days`, and of runs."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread

from decathlon_mcp.storage.kept_files import RESERVED_FILE
from decathlon_mcp.storage.store import Store
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import public_id

MAX_PER_ROUND = 500
"""Episodes that one round deletes, so that it takes seconds at most."""
MAX_RUN_EPISODES = 1_000_000
"""Episodes of a run that one call deletes."""
DAY_SECONDS = 86_400.0
UNFINISHED_SECONDS = 7 * DAY_SECONDS
"""Age at which a folder that nobody has closed counts as finished; no episode takes as long."""

_log = logging.getLogger("decathlon.storage")


async def delete_old_episodes(
    store: Store | None, folder: Path, keep_days: float, *, limit: int = MAX_PER_ROUND
) -> int:
    """Delete the files of episodes that ended more than `keep_days` ago; returns the number of episodes.

    The numbers and labels of an episode stay in its row, so that runs keep theirs. Pinned episodes keep all.
    `folder`: the one with a folder for each episode. Folders that the store does not know (of `stdio`) are as
    old as their newest file. At most `limit` are deleted, the oldest rows first. What cannot be deleted is
    logged and tried again by the next call. Links are removed, never followed.
    """
    before = time.time() - keep_days * DAY_SECONDS
    deleted = 0
    for episode in [] if store is None else store.old_episodes(before, limit):
        # The folder first: after a crash in between, the row brings the next round here again.
        if await anyio.to_thread.run_sync(_delete, folder, episode):
            assert store is not None
            store.forget_files(episode)
            deleted += 1
    if deleted < limit:
        deleted += await anyio.to_thread.run_sync(_delete_unknown, folder, before, limit - deleted)
    if deleted:
        _log.info("deleted the files of old episodes", extra=fields(episodes=deleted, keep_days=keep_days))
    return deleted


async def delete_run(store: Store, folder: Path, run: str, *, owner: str | None = None) -> int:
    """Delete the episodes of a run that are over, with their files and rows; returns their number.

    `owner`: only those of that token. Live episodes stay. What cannot be deleted is logged and stays.
    """
    deleted = 0
    for episode in store.ended_of_run(run, owner, MAX_RUN_EPISODES):
        if await anyio.to_thread.run_sync(_delete, folder, episode):
            store.delete_ended(episode)
            deleted += 1
    _log.info("deleted a run", extra=fields(run=run, episodes=deleted, owner=owner))
    return deleted


def _delete_unknown(folder: Path, before: float, limit: int) -> int:
    """Delete folders of that age that the store does not know; returns their number."""
    deleted = 0
    # Read here and not on the event loop: it may know a hundred thousand.
    with Store.open_read_only(folder.parent) as store:
        known = set[str]() if store is None else store.handles()
    for entry in _folders(folder):
        if deleted == limit:
            break
        if entry.name not in known and _ended_before(Path(entry.path), before):
            deleted += _delete(folder, entry.name)
    return deleted


def _folders(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return


def _ended_before(folder: Path, before: float) -> bool:
    """Whether the folder's files are all older than that; by UNFINISHED_SECONDS more if it is still open."""
    try:
        with os.scandir(folder) as entries:
            times = {entry.name: entry.stat(follow_symlinks=False).st_mtime for entry in entries}
        newest = max([folder.stat().st_mtime, *times.values()])
    except OSError:
        return False
    return newest < before - (UNFINISHED_SECONDS if RESERVED_FILE in times else 0)


def _delete(folder: Path, episode: str) -> bool:
    """Delete one folder; whether it is gone."""
    target = folder / episode
    if target.parent != folder or episode in ("", ".", ".."):
        return False  # not the name of a folder in this one
    try:
        if target.is_symlink():
            target.unlink()
        else:
            shutil.rmtree(target)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning(
            "an old episode could not be deleted",
            extra=fields(episode=public_id(episode), why=error.strerror),
        )
        return False
    return True
