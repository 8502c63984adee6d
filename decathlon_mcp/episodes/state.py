"""Where an episode stands: one phase, moved along the table and nowhere else, and a way to wait for it."""

from __future__ import annotations

import anyio

from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.model import MOVES, Ending, Phase


class State:
    """A phase; once it is ENDED, `ending` says why and `cause` is the error behind it, if there is one."""

    def __init__(self) -> None:
        self.phase = Phase.QUEUED
        self.ending: Ending | None = None
        self.cause: DecathlonError | None = None
        self._moved = anyio.Event()

    def move(self, to: Phase) -> None:
        """Raises RuntimeError for a move that the table does not allow."""
        if to not in MOVES[self.phase]:
            raise RuntimeError(f"an episode cannot go from {self.phase} to {to}")
        self.phase = to
        self._moved.set()
        self._moved = anyio.Event()

    def end(self, ending: Ending, cause: DecathlonError | None = None) -> None:
        """The last move. The first ending stands."""
        if self.phase is not Phase.ENDED:
            self.ending, self.cause = ending, cause
            self.move(Phase.ENDED)

    async def reach(self, *phases: Phase) -> Phase:
        """Wait until the phase is one of these; which."""
        while self.phase not in phases:
            await self._moved.wait()
        return self.phase
