"""Where an episode stands: one phase, moved along the table and nowhere else, and a way to wait for it."""

from __future__ import annotations

from enum import StrEnum

import anyio

from decathlon_mcp.errors import DecathlonError


class Phase(StrEnum):
    """Where an episode stands in its life (`MOVES` says what may follow what)."""

    QUEUED = "queued"
    OPENING = "opening"
    READY = "ready"
    CLAIMED = "claimed"
    SCORED = "scored"
    ENDED = "ended"


MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.OPENING, Phase.ENDED}),
    Phase.OPENING: frozenset({Phase.READY, Phase.ENDED}),
    Phase.READY: frozenset({Phase.CLAIMED, Phase.ENDED}),
    Phase.CLAIMED: frozenset({Phase.SCORED, Phase.ENDED}),
    Phase.SCORED: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class Ending(StrEnum):
    """Why an episode ended."""

    CLOSED = "closed by its client"
    SCORED = "scored"
    LEASE_EXPIRED = "its lease expired: no request for too long"
    TIME_OVER = "its time is over"
    SANDBOX_LOST = "its sandbox was lost"
    SET_UP_FAILED = "its set-up failed"
    NO_VERDICT = "its evaluation gave no verdict"
    SERVER_STOPPED = "the server shut down"
    FAULT = "a fault of the server"


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
