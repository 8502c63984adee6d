"""The end of a server's episodes: they are drained, or handed over to the next server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import anyio

from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.extensions import SandboxSource
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.episodes")

HAND_OVER_SECONDS = 5.0
"""How long a server that hands over removes the sandboxes of its pool; the next one removes the others."""
END_SECONDS = 15.0
"""How long a server that stops waits for the ends of episodes whose gradings it has cancelled."""


class Shutdown:
    """The end of a server: it drains its episodes, or hands them over to the next one.

    `live`: returns the episodes that have not ended. `on_stop`: called when no episode can be started any
    more.
    """

    def __init__(
        self,
        live: Callable[[], Sequence[Episode]],
        source: SandboxSource,
        drain_seconds: float,
        on_stop: Callable[[], None],
    ) -> None:
        self._live = live
        self._source = source
        self._drain_seconds = drain_seconds
        self._on_stop = on_stop
        self.has_begun = False
        """Whether the server is stopping; then no episode can be started."""
        self.handing_over = False
        """Whether this server ends and leaves its episodes and sessions to the next one."""
        self.drained = anyio.Event()
        """Set when a stopping server has no episode left to wait for."""
        self.runners: set[anyio.CancelScope] = set()
        """The scopes of the runners, which are cancelled when the time is over."""
        self._scope: anyio.CancelScope | None = None
        self._deadline: float | None = None

    def refuse_if_begun(self) -> None:
        """Raise AtCapacityError if no episode can be started any more."""
        if self.has_begun:
            raise AtCapacityError("the server is shutting down: no new episodes", retryAfterSeconds=30.0)

    async def drain(self) -> None:
        """End every episode; wait at most `drain_seconds`, or until `hurry`, for gradings in progress.

        A grading that takes longer ends without a score, so that waiting requests get an answer.
        """
        self.has_begun = True
        self._on_stop()
        self._source.close()
        if live := self._live():
            log.info("draining", extra=fields(episodes=len(live)))
        for episode in live:
            episode.close(Ending.SERVER_STOPPED)
        # A second call, at the end of `running`, must not extend the time.
        if self._deadline is None:
            self._deadline = anyio.current_time() + self._drain_seconds
        with anyio.CancelScope(deadline=self._deadline) as self._scope:
            await self._all_ended()
        for scope in self.runners:
            scope.cancel()
        with anyio.move_on_after(END_SECONDS):
            await self._all_ended()
        self.drained.set()

    async def _all_ended(self) -> None:
        for episode in self._live():
            await episode.state.reach(Phase.ENDED)

    def hurry(self) -> None:
        """Let `drain` wait no longer for gradings."""
        self._deadline = anyio.current_time()
        if self._scope is not None:
            self._scope.deadline = self._deadline

    async def hand_over(self) -> None:
        """Start no further episode; leave running episodes to the next server on the state folder.

        Returns when every remaining sandbox belongs to an episode, after at most `HAND_OVER_SECONDS`.
        """
        self.has_begun = self.handing_over = True
        self._on_stop()
        with anyio.move_on_after(HAND_OVER_SECONDS):
            await self._source.empty()
