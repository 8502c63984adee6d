"""How far a batch is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Episodes by where they stand. `total` is None where the tasks do not say how many they are.

    `scored` have a reward; `lost` none, by the infrastructure's fault; `broken` none, by the player's.
    """

    total: int | None = None
    opening: int = 0
    playing: int = 0
    grading: int = 0
    scored: int = 0
    lost: int = 0
    broken: int = 0
    rewards: float = 0.0

    @property
    def done(self) -> int:
        return self.scored + self.lost + self.broken

    @property
    def mean_reward(self) -> float | None:
        """Of those that have one."""
        return self.rewards / self.scored if self.scored else None

    def __str__(self) -> str:
        mean = "-" if self.mean_reward is None else f"{self.mean_reward:.3f}"
        said = f"reward {mean}, {self.opening} opening, {self.playing} playing, {self.grading} grading"
        said += f", {self.lost} lost" if self.lost else ""
        return said + (f", {self.broken} broken" if self.broken else "")
