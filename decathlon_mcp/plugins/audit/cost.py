"""The cost of a task: time, processor time and memory of an empty attempt, on an otherwise idle machine.

The cost of a call is measured in the attempt that reads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from decathlon_client.values import JsonObject, Verdict
from pydantic import TypeAdapter

from decathlon_mcp.plugins.audit.attempts import KeptResults

_MIB = 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one attempt without a call. Processor time and memory are the whole machine's.

    `set_up_*`: until the tools were there. `grading_*`: with the removal of its sandboxes. `memory_mib`: of
    the open sandbox, with the task's servers that start at set-up. `call_*`: the mean of the calls that read,
    with the start of servers that start at the first call.
    """

    set_up_seconds: float
    set_up_cpu_seconds: float
    grading_seconds: float
    grading_cpu_seconds: float
    memory_mib: float
    call_seconds: float | None = None
    call_cpu_seconds: float | None = None

    def to_json(self) -> JsonObject:
        return {name: value and round(value, 3) for name, value in asdict(self).items()}


COSTS = TypeAdapter(dict[str, Cost])


@dataclass(slots=True)
class Measured:
    """Readings around one attempt: seconds, processor seconds, and MiB that are free."""

    before: tuple[float, float, float]
    ready: tuple[float, float, float] | None = None
    after: tuple[float, float, float] | None = None

    @classmethod
    def now(cls) -> Self:
        return cls(_read())

    def opened(self) -> None:
        self.ready = _read()

    def cost(self, verdict: Verdict) -> Cost | None:
        """What the attempt with this verdict took."""
        if self.ready is None or self.after is None:
            return None
        return Cost(
            set_up_seconds=self.ready[0] - self.before[0],
            set_up_cpu_seconds=self.ready[1] - self.before[1],
            grading_seconds=float(verdict.raw.get("seconds") or 0.0),
            grading_cpu_seconds=self.after[1] - self.ready[1],
            memory_mib=max(0.0, self.before[2] - self.ready[2]),
        )


@dataclass(slots=True)
class CostMeter:
    """Measures attempts one after the other. `kept`: what tasks cost, measured also by earlier audits."""

    kept: KeptResults[Cost]

    def cost_of(self, task: str, measured: Measured, verdict: Verdict) -> Cost | None:
        """What the attempt took that was measured now, or in an earlier audit. Blocks."""
        if (cost := measured.cost(verdict)) is not None:
            self.kept.keep(task, cost)
        return self.kept.known.get(task)

    def cost_with_calls(self, task: str, measured: Measured, calls: int) -> Cost | None:
        """The same, with the calls of another attempt, if these were measured now. Blocks."""
        cost, after = self.kept.known.get(task), measured.after
        if cost is not None and after is not None and calls:
            seconds, cpu_seconds = ((after[i] - measured.before[i]) / calls for i in (0, 1))
            self.kept.keep(task, replace(cost, call_seconds=seconds, call_cpu_seconds=cpu_seconds))
        return self.kept.known.get(task)

    @contextmanager
    def measuring(self) -> Generator[Measured]:
        measured = Measured.now()
        try:
            yield measured
        finally:
            measured.after = _read()


def _read() -> tuple[float, float, float]:
    fields = Path("/proc/stat").read_text("utf-8").split("\n", 1)[0].split()[1:8]
    user, nice, system, _, _, irq, soft_irq = map(int, fields)
    busy = (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")
    lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    free = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
    return time.monotonic(), busy, free / _MIB
