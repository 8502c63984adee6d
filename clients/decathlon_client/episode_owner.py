"""Tasks that start and close a client's episodes; cancelling a user of an episode does not stop them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from decathlon_client.background import background_tasks
from decathlon_client.errors import ConnectionLostError
from decathlon_client.values import JsonObject


class EpisodeOwner:
    """One episode, started and closed by one task; its user waits for both."""

    # asyncio's cancellation, unlike anyio's, goes through every shield. In the user's task it would lose the
    # handle of an episode that the server is starting, or its closing.

    def __init__(
        self, start: Callable[[], Awaitable[JsonObject]], close: Callable[[str, str | None], Awaitable[None]]
    ) -> None:
        """`start` gives the result of `start_episode`; `close` is bounded and never raises."""
        self._start = start
        self._close = close
        self.reason: str | None = None
        """Why its user leaves it, for people who look at it."""
        self._started: JsonObject | None = None
        self._error: Exception | None = None
        self._starting = anyio.CancelScope()
        self._ready = anyio.Event()
        self._released = anyio.Event()
        self._closed = anyio.Event()

    async def run(self) -> None:
        """Start the episode, and close it once it is released."""
        with anyio.CancelScope(shield=True):
            try:
                with self._starting:
                    self._started = await self._start()
                self._ready.set()
                if self._started is not None:
                    await self._released.wait()
                    await self._close(str(self._started["episode"]), self.reason)
            except Exception as error:  # noqa: BLE001
                self._error = error
            finally:
                self._ready.set()
                self._closed.set()

    async def started(self) -> JsonObject:
        """Wait until the episode is started. Returns the result of `start_episode`; raises its error."""
        await self._ready.wait()
        if self._started is None:
            raise self._error or ConnectionLostError("this was closed")
        return self._started

    def release(self) -> None:
        """Let the episode be closed, as soon as it is known if the server is starting it."""
        self._starting.cancel()
        self._released.set()

    async def aclose(self) -> None:
        """Release the episode and wait until it is closed; the closing goes on if this is cancelled."""
        self.release()
        await self._closed.wait()


class EpisodeOwners:
    """Runs the owners of one client."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._owners: set[EpisodeOwner] = set()

    def add(self, owner: EpisodeOwner) -> None:
        """Run an owner in a task."""

        async def run() -> None:
            try:
                await owner.run()
            finally:
                self._owners.discard(owner)

        self._owners.add(owner)
        self._tasks.start_soon(run)

    def release(self) -> None:
        """Release all episodes."""
        for owner in self._owners:
            owner.release()


@asynccontextmanager
async def episode_owners() -> AsyncGenerator[EpisodeOwners]:
    """Owners of episodes; on exit all are closed, however often the exit is cancelled."""
    async with background_tasks() as tasks:
        owners = EpisodeOwners(tasks)
        try:
            yield owners
        finally:
            owners.release()
