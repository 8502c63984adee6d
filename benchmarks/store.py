"""What the store costs a call: servers whose sandboxes survive them and whose do not, in turns."""

from __future__ import annotations

from benchmarks.figures import Figures, Target
from benchmarks.running import Run
from benchmarks.survival.cost import PATHS, measure_cost

TARGET = Target("at most", 1.05)


async def measure_store(run: Run, figures: Figures) -> None:
    for _ in range(run.options.repeats):
        cost = await measure_cost("host", rounds=run.options.rounds)
        for path in PATHS:
            with_store, without = cost.samples[path, True], cost.samples[path, False]
            figures.add(
                f"{path}: p50",
                "ms",
                with_store.p50 * 1e3,
                floor=("no store", without.p50 * 1e3),
                target=TARGET,
            )
