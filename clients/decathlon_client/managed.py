"""An episode for frameworks that open in one hook and close in another, perhaps in another task.

A task of its own owns the connection and the episode, so that they are entered and left where they belong.
"""

from __future__ import annotations

import asyncio

from decathlon_client.decathlon import Decathlon
from decathlon_client.episode import Episode
from decathlon_client.opener import OpeningOptions


class ManagedEpisode:
    """Made by `open`; `episode` is ready. Under asyncio only, as those frameworks are."""

    def __init__(self, url: str, token: str | None, task: str, options: OpeningOptions) -> None:
        self._url, self._token = url, token
        self._asked, self._options = task, options
        self._ready: asyncio.Future[Episode] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._owner = asyncio.create_task(self._own())

    @classmethod
    async def open(
        cls, url: str, task: str, *, token: str | None = None, options: OpeningOptions | None = None
    ) -> ManagedEpisode:
        """Opened with patience, as a batch's are. Raises what the last try said; cancelled, leaves none."""
        managed = cls(url, token, task, options or {})
        try:
            await asyncio.shield(managed._ready)
        except BaseException:
            managed._owner.cancel()
            await asyncio.gather(managed._owner, return_exceptions=True)
            raise
        return managed

    @property
    def episode(self) -> Episode:
        return self._ready.result()

    async def close(self) -> None:
        """Close the episode; what was claimed is graded all the same. Never raises; again does nothing."""
        self._over.set()
        await asyncio.gather(asyncio.shield(self._owner), return_exceptions=True)

    async def _own(self) -> None:
        try:
            async with (
                Decathlon(self._url, self._token) as d,
                d.opened(self._asked, **self._options) as episode,
            ):
                self._ready.set_result(episode)
                await self._over.wait()
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
