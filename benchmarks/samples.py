"""Times of the same thing done many times, and of several things done in turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")
EpisodeResolver = Callable[[], Awaitable[float]]
"""Does the thing once; how many seconds it took."""


@dataclass(frozen=True, slots=True)
class Samples:
    """In seconds, in the order measured."""

    seconds: tuple[float, ...]

    @property
    def p50(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)]

    def __add__(self, other: Samples) -> Samples:
        """Both, one after the other, round by round."""
        return Samples(tuple(a + b for a, b in zip(self.seconds, other.seconds, strict=True)))


async def in_turns(ways: Mapping[K, EpisodeResolver], *, rounds: int, warm_up: int) -> dict[K, Samples]:
    """Every way once a round, in an order drawn anew; the first `warm_up` rounds are thrown away."""
    taken: dict[K, list[float]] = {name: [] for name in ways}
    for _ in range(warm_up + rounds):
        for name in random.sample([*ways], len(ways)):
            taken[name].append(await ways[name]())
    return {name: Samples(tuple(seconds[warm_up:])) for name, seconds in taken.items()}


def timed(do: Callable[[], Awaitable[object]]) -> EpisodeResolver:
    async def once() -> float:
        began_at = time.perf_counter()
        await do()
        return time.perf_counter() - began_at

    return once
