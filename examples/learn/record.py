"""What a training reports: the curve, the episodes without a reward, and where the time went."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from decathlon_client import Result

from examples.learn.model import Conversation

Group = list[Result[Conversation]]


@dataclass(slots=True)
class Record:
    """What a training reports, as JSON."""

    options: dict[str, Any]
    parameters: int = 0
    prompt_tokens: dict[str, int] = field(default_factory=dict[str, int])
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    held_out: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Mean reward and pass rate of each task, before and after."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    """Of the whole, of the model's parts, and, summed over episodes, of openings, calls and gradings."""
    faults: Counter[str] = field(default_factory=Counter[str])
    """Episodes without a reward, by whose fault it is, and those that were played again."""
    episodes: int = 0
    verdicts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def per_minute(self) -> float:
        """Episodes a minute, updates included."""
        return 60 * self.episodes / max(1e-9, self.seconds["training"])

    def count(self, result: Result[Conversation]) -> None:
        """Count an episode and its times."""
        self.episodes += 1
        if result.lost:
            self.faults["played again"] += len(result.lost)
        if result.verdict is None:
            self.faults[str(result.fault)] += 1
            return
        raw = dict(result.verdict.raw)
        self.verdicts.append(raw)
        grading = seconds_between(raw["claimed_at"], raw["scored_at"])
        played = 0.0 if result.played is None else result.played.seconds
        self.seconds["openings"] += max(0.0, result.seconds - played - grading)
        self.seconds["gradings"] += grading

    def add_step(self, step: int, groups: Sequence[Group], seconds: float) -> None:
        """Add the figures of a step."""
        results = [result for group in groups for result in group]
        by_task: dict[str, list[float]] = defaultdict(list)
        for result in results:
            self.count(result)
            if result.reward is not None:
                by_task[result.task].append(result.reward)
        sampled = [sum(result.played.sampled) for result in results if result.played is not None]
        figures = {
            "step": step,
            **spread([reward for rewards in by_task.values() for reward in rewards]),
            "tasks": {task: spread(rewards) for task, rewards in sorted(by_task.items())},
            "tokens": round(sum(sampled) / max(1, len(sampled)), 1),
            "seconds": round(seconds, 2),
        }
        self.steps.append(figures)

    def as_json(self) -> dict[str, Any]:
        """Everything but the verdicts."""
        return {
            "options": self.options,
            "parameters": self.parameters,
            "prompt_tokens": self.prompt_tokens,
            "episodes": self.episodes,
            "episodes_per_minute": round(self.per_minute, 1),
            "faults": dict(self.faults),
            "seconds": {name: round(seconds, 1) for name, seconds in self.seconds.items()},
            "held_out": self.held_out,
            "steps": self.steps,
        }


def held_out_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Mean reward and pass rate of some groups."""
    verdicts = [result.verdict for group in groups for result in group if result.verdict is not None]
    passed = sum(verdict.success for verdict in verdicts) / max(1, len(verdicts))
    return {**spread([verdict.reward for verdict in verdicts]), "pass_rate": round(passed, 4)}


def spread(rewards: Sequence[float]) -> dict[str, float]:
    """Count, mean and standard deviation."""
    count = len(rewards)
    mean = sum(rewards) / max(1, count)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / max(1, count - 1))
    return {"episodes": count, "reward": round(mean, 4), "deviation": round(deviation, 4)}


def seconds_between(a: str, b: str) -> float:
    """From one time of a verdict to another."""
    return (datetime.fromisoformat(b) - datetime.fromisoformat(a)).total_seconds()
