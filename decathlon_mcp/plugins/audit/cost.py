"""The cost of a task: time, processor time and memory of an empty attempt, on an otherwise idle machine."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from decathlon_client.values import JsonObject, Verdict
from pydantic import TypeAdapter, ValidationError

from decathlon_mcp.storage.disk import new_file

_MIB = 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one attempt without a call. Processor time and memory are the whole machine's.

    `set_up_*`: until the tools were there. `grading_*`: with the removal of its sandboxes. `memory_mib`: of
    the open sandbox, with the task's servers that start at set-up.
    """

    set_up_seconds: float
    set_up_cpu_seconds: float
    grading_seconds: float
    grading_cpu_seconds: float
    memory_mib: float

    def to_json(self) -> JsonObject:
        return {name: round(value, 3) for name, value in asdict(self).items()}


_COSTS = TypeAdapter(dict[str, Cost])


@dataclass(slots=True)
class Measured:
    """Readings around one attempt: seconds, processor seconds, and MiB that are free."""

    before: tuple[float, float, float]
    ready: tuple[float, float, float] | None = None
    after: tuple[float, float, float] | None = None

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
    """Measures attempts one after the other, and keeps what they cost in a file."""

    file: Path
    known: dict[str, Cost] = field(default_factory=dict[str, Cost])

    def read(self) -> None:
        """Read what an earlier audit has measured; nothing if it cannot be read. Blocks."""
        with suppress(OSError, ValidationError):
            self.known = _COSTS.validate_json(self.file.read_bytes())

    def cost_of(self, task: str, measured: Measured, verdict: Verdict) -> Cost | None:
        """What the attempt took that was measured now, or in an earlier audit. Blocks."""
        if (cost := measured.cost(verdict)) is not None:
            self.known[task] = cost
            self.file.parent.mkdir(exist_ok=True)
            with new_file(self.file, self.file.with_suffix(".new")) as file:
                file.write(_COSTS.dump_json(self.known))
        return self.known.get(task)

    @contextmanager
    def measuring(self) -> Generator[Measured]:
        measured = Measured(_read())
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
