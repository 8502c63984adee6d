"""An episode for frameworks that open it in one hook and close it in another, perhaps in another task."""

from __future__ import annotations

import asyncio
from typing import Self, Unpack

import anyio

from decathlon_client.decathlon import Decathlon
from decathlon_client.episode import Episode
from decathlon_client.opener import RETRIES, OpeningOptions
from decathlon_client.values import Task

_owners: set[asyncio.Task[None]] = set()


class ManagedEpisode:
    """An open episode with a connection of its own; made by `open`, and open until `close`.

    For hooks of frameworks that use asyncio: it may be opened in one task and closed in another.
    """

    # One task of its own opens and closes the connection and the episode: anyio's cancel scopes must be left
    # in the task that entered them.

    def __init__(self, decathlon: Decathlon, task: str | Task, options: OpeningOptions) -> None:
        self._decathlon, self._task, self._options = decathlon, task, options
        self._ready: asyncio.Future[Episode] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._scope = anyio.CancelScope()
        self._owner = asyncio.create_task(self._run())
        # asyncio itself keeps only weak references to tasks.
        _owners.add(self._owner)
        self._owner.add_done_callback(_owners.discard)

    @classmethod
    async def open(
        cls,
        task: str | Task,
        *,
        url: str | None = None,
        token: str | None = None,
        **options: Unpack[OpeningOptions],
    ) -> Self:
        """Open an episode with retries, as a batch does. `url` and `token` are as for `Decathlon`.

        Raises the error of the last try; cancelled, it leaves no episode.
        """
        managed = cls(Decathlon(url, token), task, {**RETRIES, **options})
        try:
            await asyncio.shield(managed._ready)
        except BaseException:
            # Not the task itself: its own cancellation would go through the shields of what it closes.
            managed._scope.cancel()
            await asyncio.gather(asyncio.shield(managed._owner), return_exceptions=True)
            raise
        return managed

    @property
    def episode(self) -> Episode:
        """The episode."""
        return self._ready.result()

    async def close(self) -> None:
        """Close the episode; a claimed attempt is still graded. Never raises; may be called again."""
        self._closing.set()
        await asyncio.gather(asyncio.shield(self._owner), return_exceptions=True)

    async def _run(self) -> None:
        try:
            with self._scope:
                async with self._decathlon as d, d.episode(self._task, **self._options) as episode:
                    self._ready.set_result(episode)
                    await self._closing.wait()
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
