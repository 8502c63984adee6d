"""The state of an episode: one phase, one table of transitions, and a way to wait for a phase."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from decathlon_mcp.background import Flag
from decathlon_mcp.errors import DecathlonError, EpisodeEndedError
from decathlon_mcp.types import as_json

MAX_CAUSE_BYTES = 16 << 10
"""An ended episode, of which the registry keeps thousands, keeps the data of its cause up to this length."""


class Phase(StrEnum):
    """The phases of an episode, in order; `TRANSITIONS` lists the allowed successors of each."""

    QUEUED = "queued"
    OPENING = "opening"
    READY = "ready"
    CLAIMED = "claimed"
    SCORED = "scored"
    ENDED = "ended"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.OPENING, Phase.ENDED}),
    Phase.OPENING: frozenset({Phase.READY, Phase.ENDED}),
    Phase.READY: frozenset({Phase.CLAIMED, Phase.ENDED}),
    Phase.CLAIMED: frozenset({Phase.SCORED, Phase.ENDED}),
    Phase.SCORED: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}

NOT_READY = frozenset({Phase.QUEUED, Phase.OPENING})
"""The phases in which no tool can be called yet."""


class Ending(StrEnum):
    """Why an episode ended. Clients see these texts."""

    CLOSED = "its client left before grading"
    SCORED = "scored"
    LEASE_EXPIRED = "its lease expired: no request for too long"
    NEVER_USED = "its lease expired: it was never used"
    CLIENT_LOST = "its client lost the connection and did not come back"
    TIME_OVER = "its time is over"
    SANDBOX_LOST = "its sandbox was lost"
    SET_UP_FAILED = "its set-up failed"
    NO_VERDICT = "its evaluation gave no verdict"
    SERVER_STOPPED = "the server shut down"
    NOT_CONTINUED = "its server died, and the next one could not continue it"
    FAULT = "a fault of the server"


class State:
    """The current phase. Once it is ENDED, `ending` is the reason and `cause` the error behind it, if any.

    `public_id`: of the episode, which errors name.
    """

    def __init__(self, public_id: str) -> None:
        self._public_id = public_id
        self.phase = Phase.QUEUED
        """Set by `move` alone, once somebody waits for a phase."""
        self.ending: Ending | None = None
        self.cause: DecathlonError | None = None
        self._changed = Flag()
        self.on_move: Callable[[Phase], None] | None = None
        """Called with the new phase, before the tasks that wait for a phase go on."""

    def move(self, to: Phase) -> None:
        """Change the phase. Raises RuntimeError for a transition that is not in the table."""
        if to not in TRANSITIONS[self.phase]:
            raise RuntimeError(f"an episode cannot go from {self.phase} to {to}")
        self.phase = to
        if self.on_move is not None:
            self.on_move(to)
        self._changed.set()
        self._changed = Flag()

    def end(self, ending: Ending, cause: DecathlonError | None = None) -> None:
        """Change to ENDED. Does nothing if the episode has ended before."""
        if self.phase is not Phase.ENDED:
            self.ending, self.cause = ending, None if cause is None else _without_frames(cause)
            self.move(Phase.ENDED)

    def end_error(self) -> DecathlonError:
        """The error of a request that comes after the end, or waited for what did not come: the cause."""
        if self.cause is not None:
            # A copy: an exception that is raised again and again collects the frames of every request.
            return type(self.cause)(self.cause.message, **{**self.cause.data, "episode": self._public_id})
        reason = str(self.ending)
        return EpisodeEndedError(f"this episode is over: {reason}", reason=reason, episode=self._public_id)

    async def reach(self, *phases: Phase) -> Phase:
        """Wait until the phase is one of these, and return it."""
        while self.phase not in phases:
            await self._changed.wait()
        return self.phase


def _without_frames(cause: DecathlonError) -> DecathlonError:
    """An error that keeps nothing alive: without the frames it passed through and without long data."""
    try:
        data = cause.data if len(as_json(cause.data)) <= MAX_CAUSE_BYTES else {}
    except (TypeError, ValueError, RecursionError):
        data = {}  # it cannot be sent to a client either
    return type(cause)(cause.message[:MAX_CAUSE_BYTES], **data)
