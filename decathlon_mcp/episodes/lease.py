"""How long an episode lives without being asked: a cancel scope's deadline, renewed by every request."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager

import anyio


class Lease:
    """An idle lease within an absolute one, both in seconds; the absolute one counts from `begin`."""

    def __init__(self, *, idle_seconds: float, absolute_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._absolute_seconds = absolute_seconds
        self._over_at = math.inf
        self._holders = 0
        self._renewed_at = anyio.current_time()
        self._scope: anyio.CancelScope | None = None
        self._ended = False

    @property
    def deadline(self) -> float:
        """On the event loop's clock."""
        idle = math.inf if self._holders else self._renewed_at + self._idle_seconds
        return min(idle, self._over_at)

    @property
    def over(self) -> bool:
        """Is it the absolute lease that has run out?"""
        return anyio.current_time() >= self._over_at

    @property
    def ended(self) -> bool:
        """Has it run out, or been ended?"""
        return self._ended or (self._scope is not None and self._scope.cancel_called)

    @contextmanager
    def limit(self) -> Generator[anyio.CancelScope]:
        """Cancel what is inside when the lease runs out, or `end` is called."""
        try:
            with anyio.CancelScope(deadline=self.deadline) as self._scope:
                if self._ended:
                    self._scope.cancel()
                yield self._scope
        finally:
            self._scope = None

    def begin(self) -> None:
        """The waiting is over: from now on the absolute lease runs."""
        self._over_at = anyio.current_time() + self._absolute_seconds
        self._renew()

    @contextmanager
    def hold(self) -> Generator[None]:
        """A request is being answered or a stream is open: the idle lease stands still, then is renewed."""
        self._holders += 1
        self._renew()
        try:
            yield
        finally:
            self._holders -= 1
            self._renew()

    def end(self) -> None:
        """Cancel what is inside `limit`, now or as soon as it is entered."""
        self._ended = True
        if self._scope is not None:
            self._scope.cancel()

    def suspend(self) -> None:
        """Nothing inside the present `limit` is cut short any more."""
        if self._scope is not None:
            self._scope.deadline = math.inf
            self._scope = None

    def _renew(self) -> None:
        self._renewed_at = anyio.current_time()
        if self._scope is not None:
            self._scope.deadline = self.deadline
