"""Repeated timings of one operation, or of several operations that take turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")
Measurement = Callable[[], Awaitable[float]]
"""Performs an operation once and returns its duration in seconds."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Durations in seconds, in the order measured."""

    seconds: tuple[float, ...]

    @property
    def p50(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)]

    def __add__(self, other: Samples) -> Samples:
        """Return the sums, round by round."""
        return Samples(tuple(a + b for a, b in zip(self.seconds, other.seconds, strict=True)))


async def measure_in_turns(
    measurements: Mapping[K, Measurement], *, rounds: int, warm_up: int
) -> dict[K, Samples]:
    """Perform each measurement once per round, in random order; discard the first `warm_up` rounds."""
    durations: dict[K, list[float]] = {name: [] for name in measurements}
    for _ in range(warm_up + rounds):
        for name in random.sample([*measurements], len(measurements)):
            durations[name].append(await measurements[name]())
    return {name: Samples(tuple(seconds[warm_up:])) for name, seconds in durations.items()}


def timed(operation: Callable[[], Awaitable[object]]) -> Measurement:
    async def measure() -> float:
        start = time.perf_counter()
        await operation()
        return time.perf_counter() - start

    return measure
