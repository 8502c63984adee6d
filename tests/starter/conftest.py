"""Fixtures: tasks of the starter suite, prepared or solved."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from decathlon_mcp.starter import oracle
from tests.starter.bench import Bench

Solved = Callable[[str, Path], Awaitable[Bench]]


@pytest.fixture(scope="session")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Solved:
    """Copies of tasks that their oracles solved; each oracle is played once per test run."""
    benches: dict[str, Bench] = {}

    async def copy(task: str, into: Path) -> Bench:
        if task not in benches:
            bench = Bench(tmp_path_factory.mktemp("solved") / task, task).prepare()
            with anyio.fail_after(120):
                await bench.play(oracle(task))
            benches[task] = bench
        shutil.copytree(benches[task].root, into, symlinks=True)
        return replace(benches[task], root=into)

    return copy
