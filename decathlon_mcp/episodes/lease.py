"""The lease of an episode: the deadline of a cancel scope, which requests renew.

Four limits apply, and the first one to pass ends the episode:

- absolute: from the start of the set-up to the claim;
- idle: since the last request;
- first use: from READY, until a first request names the episode;
- grace: since the client was lost, until its next request. It applies only where losing the connection means
  something: see `Lease.lose_client`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from operator import itemgetter

import anyio

from decathlon_mcp.background import LazyTimer
from decathlon_mcp.episodes.specification import EpisodeLimits
from decathlon_mcp.episodes.state import Ending


class Hold:
    """A request that is being served, or a stream that is open. Stops all limits but the absolute one."""

    def __init__(self, lease: Lease) -> None:
        self._lease: Lease | None = lease

    def release(self, *, answered: bool = True) -> bool:
        """End the hold; False if it has ended before. `answered`: the client was there to the end."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.end_hold(answered=answered)
        return lease is not None


class Lease:
    """The time limits of one episode. Times are by `time.monotonic`, the event loop's clock."""

    # Requests mostly put the deadline off. The timer is left as it is then, and looks at the deadline again.

    def __init__(self, limits: EpisodeLimits) -> None:
        self._limits = limits
        self._absolute_deadline = math.inf
        self._holders = 0
        self._renewed_at = time.monotonic()
        # Infinite: has not happened.
        self._ready_at = self._client_lost_at = math.inf
        self._used = self._lost_until_ready = self._ended = False
        self._scope: anyio.CancelScope | None = None
        self._timer = LazyTimer(self._look)

    @property
    def deadline(self) -> float:
        """When the lease expires; infinite before `start` while there is a `Hold`."""
        return self._absolute_deadline if self._holders else self._first[0]

    @property
    def ending(self) -> Ending:
        """The ending of an episode whose lease has expired, by the limit that passed first."""
        return self._first[1]

    @property
    def expired(self) -> bool:
        """Whether the lease ran out inside the current `limit`, or `end` was called."""
        return self._ended or (self._scope is not None and self._scope.cancel_called)

    @contextmanager
    def limit(self) -> Generator[anyio.CancelScope]:
        """Cancel the body when the lease expires or `end` is called."""
        try:
            with anyio.CancelScope() as self._scope:
                if self._ended:
                    self._scope.cancel()
                self._watch()
                yield self._scope
        finally:
            self.suspend()

    def start(self, *, elapsed_seconds: float = 0.0) -> None:
        """Start the absolute time limit, of which so much has passed, and renew the idle one."""
        self._renewed_at = time.monotonic()
        self._absolute_deadline = self._renewed_at + self._limits.episode_seconds - elapsed_seconds
        self._watch()

    def mark_ready(self) -> None:
        """Start the limit for the first use, if there was none yet."""
        self._ready_at = time.monotonic()
        if self._lost_until_ready:
            self._client_lost_at = math.inf
        self._watch()

    def mark_used(self) -> None:
        """A request has named the episode: the limit for the first use does not apply any more."""
        if not self.expired:
            self._used = True

    def acquire(self, *, use: bool = True) -> Hold:
        """Begin to serve a request or a stream. `use` False: it does not count as the first use."""
        self._holders += 1
        # A request that arrives while the runner cleans up does not change why the lease expired.
        if not self.expired:
            self._used = self._used or use
            self._client_lost_at = math.inf
        return Hold(self)

    @contextmanager
    def hold(self, *, use: bool = True) -> Generator[None]:
        """`acquire` for the duration of the context."""
        hold = self.acquire(use=use)
        try:
            yield
        finally:
            hold.release()

    def end_hold(self, *, answered: bool) -> None:
        """Called by `Hold.release`."""
        self._holders -= 1
        if not self.expired:
            self._renewed_at = time.monotonic()
            if answered:
                self._client_lost_at = math.inf
            elif self._client_lost_at != math.inf:
                self._client_lost_at = self._renewed_at
            if not self._used or not answered:
                self._watch()  # these limits may pass before the next look

    def lose_client(self, *, until_ready: bool = False) -> None:
        """The client's connection broke: the grace starts, and lasts until the next request.

        `until_ready`: only while nobody can play the episode yet, so that a client that does not wait for it
        any more is gone. Later it may be thinking, and only a session whose own stream broke is lost.
        """
        if not (until_ready and self._ready_at != math.inf):
            self._client_lost_at, self._lost_until_ready = time.monotonic(), until_ready
            self._watch()

    def end(self) -> None:
        """Cancel the body of `limit`, now or as soon as it is entered."""
        self._ended = True
        self._expire()

    def suspend(self) -> None:
        """Remove the deadline of the current `limit`: neither time nor `end` cancels its body any more."""
        self._scope = None
        self._timer.stop()

    @property
    def _first(self) -> tuple[float, Ending]:
        """The limit that passes first without a holder, and the ending for it."""
        limits, first_use_from = self._limits, math.inf if self._used else self._ready_at
        deadlines = (
            (self._absolute_deadline, Ending.TIME_OVER),
            (self._client_lost_at + limits.grace_seconds, Ending.CLIENT_LOST),
            (first_use_from + limits.first_use_seconds, Ending.NEVER_USED),
            (self._renewed_at + limits.idle_seconds, Ending.LEASE_EXPIRED),
        )
        return min(deadlines, key=itemgetter(0))

    def _watch(self) -> None:
        """Look again when the lease can expire at the earliest: a hold may end at any time."""
        if self._scope is not None:
            idle = time.monotonic() + self._limits.idle_seconds
            self._timer.set(min(self.deadline, idle) if self._holders else self.deadline)

    def _look(self) -> None:
        if self.deadline <= time.monotonic():
            self._expire()
        else:
            self._watch()

    def _expire(self) -> None:
        if self._scope is not None:
            self._scope.cancel()
