"""What the page does to a whole run: it pins the run's files, or deletes the run."""

from __future__ import annotations

import logging
from pathlib import Path

import anyio.to_thread

from decathlon_mcp.storage.kept_files import delete_folder
from decathlon_mcp.storage.store import ENDED, Store
from decathlon_mcp.telemetry.logs import fields

MAX_RUN_EPISODES = 1_000_000
"""Episodes of a run that one call deletes."""

_log = logging.getLogger("decathlon.page")


def pin_run(store: Store, run: str, *, pinned: bool, owner: str | None = None) -> None:
    """Keep the files of a run's episodes from `--keep-days`, or no longer.

    `owner`: only episodes of that token. Episodes that start later are as the newest of their run.
    """
    change = "UPDATE episodes SET pinned = ? WHERE run = ? AND (? IS NULL OR token = ?)"
    store.write((change, (pinned, run, owner, owner)))


async def delete_run(store: Store, folder: Path, run: str, *, owner: str | None = None) -> int:
    """Delete the episodes of a run that are over, with their files and rows; returns their number.

    `folder`: the one with a folder for each episode. `owner`: only episodes of that token. Live episodes
    stay. What cannot be deleted is logged and stays.
    """
    deleted = 0
    ended = "SELECT id FROM episodes WHERE run = ? AND phase = ? AND (? IS NULL OR token = ?) LIMIT ?"
    for (handle,) in store.query(ended, run, ENDED, owner, owner, MAX_RUN_EPISODES):
        if await anyio.to_thread.run_sync(delete_folder, folder, handle):
            store.write(("DELETE FROM episodes WHERE id = ? AND phase = ?", (handle, ENDED)))
            deleted += 1
    _log.info("deleted a run", extra=fields(run=run, episodes=deleted, owner=owner))
    return deleted
