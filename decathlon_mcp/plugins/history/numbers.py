"""The statistics of attempts: pass@k, pass^k, means with standard errors, and paired differences.

`decathlon_client.results` has the same formulas for a batch, since neither side may import the other; a test
compares them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from decathlon_mcp.plugins.history.values import Estimate


def pass_at(k: int, attempts: int, successes: int) -> float:
    """The probability that at least one of `k` attempts succeeds: `1 - C(n-c, k) / C(n, k)`.

    Raises ValueError unless `k` is from 1 to `attempts`.
    """
    return 1 - math.comb(attempts - successes, k) / _choices(k, attempts)


def pass_all(k: int, attempts: int, successes: int) -> float:
    """The probability that all of `k` attempts succeed: `C(c, k) / C(n, k)`. Raises as `pass_at`."""
    return math.comb(successes, k) / _choices(k, attempts)


def _choices(k: int, attempts: int) -> int:
    if not 1 <= k <= attempts:
        raise ValueError(f"k must be from 1 to {attempts}, not {k}")
    return math.comb(attempts, k)


@dataclass(slots=True)
class Sums:
    """The count of values, their sum and that of their squares, which can be added to others."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        sums = cls()
        for value in values:
            sums.count += 1
            sums.total += value
            sums.squares += value * value
        return sums

    @classmethod
    def of_shares(cls, successes: int, attempts: int) -> Self:
        """Of that many ones among zeros."""
        return cls(attempts, successes, successes)

    def add(self, other: Sums) -> None:
        self.count += other.count
        self.total += other.total
        self.squares += other.squares

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def estimate(self) -> Estimate | None:
        """The mean with its standard error, the sample's deviation over the root of the count."""
        if not self.count:
            return None
        mean = self.total / self.count
        if self.count == 1:
            return Estimate(mean, None, 1)
        # Rewards are of the order of 1, so that the difference of sums is exact enough; never below zero.
        variance = max(0.0, self.squares - self.count * mean * mean) / (self.count - 1)
        return Estimate(mean, math.sqrt(variance / self.count), self.count)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`: the k for which reports have pass@k."""
    return [2**power for power in range(most.bit_length())]
