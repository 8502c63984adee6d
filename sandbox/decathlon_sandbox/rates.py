"""Token bucket: a rate with a burst."""

from __future__ import annotations

import time


class TokenBucket:
    """Allows `per_second` units a second on average and `burst` units at once."""

    def __init__(self, *, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._available = burst
        self._refilled_at = time.monotonic()

    def take(self, amount: float = 1.0) -> bool:
        """Take that many units if they are available, else none."""
        self._refill()
        if amount > self._available:
            return False
        self._available -= amount
        return True

    def spend(self, amount: float) -> float:
        """Take that many units in any case; returns the seconds to wait until none is owed."""
        self._refill()
        self._available -= amount
        return max(0.0, -self._available / self._per_second)

    def _refill(self) -> None:
        now = time.monotonic()
        refilled = self._available + (now - self._refilled_at) * self._per_second
        self._available, self._refilled_at = min(self._burst, refilled), now
