"""Fixtures: tasks of the starter suite, prepared or solved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from decathlon_mcp.starter import oracle
from tests.starter.bench import LAUNCH_TIME, Bench


@dataclass(frozen=True)
class LayOut:
    """Prepares a task for an attempt."""

    where: Path

    def __call__(self, task: str, launch_time: str = LAUNCH_TIME) -> Bench:
        root = self.where / f"episode-{len(list(self.where.iterdir()))}"
        root.mkdir()
        bench = Bench(root, task, launch_time)
        bench.prepare()
        return bench


class Solved:
    """Copies of tasks that their oracles solved; each oracle is played once per test run."""

    def __init__(self, where: Path) -> None:
        self.lay_out = LayOut(where)
        self.benches: dict[str, Bench] = {}

    async def __call__(self, task: str, into: Path) -> Bench:
        if task not in self.benches:
            bench = self.lay_out(task)
            with anyio.fail_after(120):
                await bench.play(oracle(task))
            self.benches[task] = bench
        return self.benches[task].copy(into)


@pytest.fixture
def lay_out(tmp_path: Path) -> LayOut:
    return LayOut(tmp_path)


@pytest.fixture(scope="session")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Solved:
    return Solved(tmp_path_factory.mktemp("solved"))
