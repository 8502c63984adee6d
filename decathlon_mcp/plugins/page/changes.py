"""Changes by people on the page of a server: episodes are ended or branched, runs pinned or deleted."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import anyio.to_thread
from anyio import from_thread

from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.plugins.retention import delete_folder
from decathlon_mcp.protocol.lobby_tools import start_tool
from decathlon_mcp.storage.store import ENDED, Store
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import public_id

BY_HAND = "by-hand"
"""The run of attempts that people play on the page."""
MAX_RUN_EPISODES = 1_000_000
"""Episodes of a run that one call deletes."""

_log = logging.getLogger("decathlon.page")


class RegistryControl:
    """What people change on a server with this registry. Called in worker threads."""

    def __init__(self, registry: EpisodeRegistry) -> None:
        self._registry = registry

    def end(self, episode_id: str) -> bool:
        """Begin to end a live episode; False if there is none."""
        return from_thread.run_sync(self._end, episode_id)

    def _end(self, episode_id: str) -> bool:
        for episode in self._registry.live:
            if public_id(episode.id) == episode_id:
                episode.close(Ending.CLOSED)
                return True
        return False

    def branch(self, episode_id: str, at: int, principal: Principal) -> str:
        """Start an attempt by hand that stands after a call of an episode; returns its public id.

        Raises DecathlonError.
        """
        return from_thread.run(self._branch, episode_id, at, principal)

    async def _branch(self, episode_id: str, at: int, principal: Principal) -> str:
        handle = self._registry.index.handle_of(episode_id)
        # With this label its starter plays on by hand. People see what differs, and decide.
        arguments = {"branch_of": handle, "at": at, "on_difference": "report", "labels": {"run": BY_HAND}}
        call = start_tool().from_arguments(arguments)
        return (await call.start(self._registry, principal)).public_id

    def pin(self, run: str, owner: str | None, *, pinned: bool) -> None:
        if (store := self._registry.store) is not None:
            from_thread.run_sync(partial(pin_run, store, run, pinned=pinned, owner=owner))

    def delete(self, run: str, owner: str | None) -> int:
        if (store := self._registry.store) is None:
            return 0
        return from_thread.run(partial(delete_run, store, self._registry.options.journals, run, owner=owner))


def pin_run(store: Store, run: str, *, pinned: bool, owner: str | None = None) -> None:
    """Keep the files of a run's episodes from `--keep-days`, or no longer.

    `owner`: only episodes of that token. Episodes that start later are as the newest of their run.
    """
    change = "UPDATE episodes SET pinned = ? WHERE run = ? AND (? IS NULL OR token = ?)"
    store.write((change, (pinned, run, owner, owner)))


async def delete_run(store: Store, folder: Path, run: str, *, owner: str | None = None) -> int:
    """Delete the episodes of a run that are over, with their files and rows; returns their number.

    `folder`: has a folder for each episode. `owner`: only episodes of that token. Live episodes stay. What
    cannot be deleted is logged and stays.
    """
    deleted = 0
    ended = "SELECT id FROM episodes WHERE run = ? AND phase = ? AND (? IS NULL OR token = ?) LIMIT ?"
    for (handle,) in store.query(ended, run, ENDED, owner, owner, MAX_RUN_EPISODES):
        if await anyio.to_thread.run_sync(delete_folder, folder, handle):
            store.write(("DELETE FROM episodes WHERE id = ? AND phase = ?", (handle, ENDED)))
            deleted += 1
    _log.info("deleted a run", extra=fields(run=run, episodes=deleted, owner=owner))
    return deleted
