"""Groups of episodes of one task: set up one by one, with sandboxes opened ahead, and as copies of the first.

    python -m benchmarks.prepared --image DIR                          # the suite of the benchmarks
    python -m benchmarks.prepared --image DIR --tasks four --episodes 16 64
    python -m benchmarks.prepared --image DIR --tasks browser          # an image with Playwright's server

All episodes of a group are opened at once, and each server of each is called once. Prints a table. Nothing
else may run on the machine: CPU time and memory are those of all of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
from decathlon_client import Decathlon, Episode

from benchmarks.machine import available_memory_mib, busy_cpu_seconds, machine
from benchmarks.running import SUITE

TASKS = ("bare", "echo", "four")
CALLS: dict[str, dict[str, Any]] = {
    "echo__echo": {"text": "x"},
    "plain__echo": {"text": "x"},
    "excel__get_workbook_metadata": {"filepath": "x.xlsx"},
    "git__git_status": {"repo_path": "."},
    "playwright__browser_close": {},
}
"""One tool of each server. Its reply may be an error: the server has started."""
WARM = 8
LONG_SECONDS = 3600
WAYS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "docker": ("docker", {}),
    "bubblewrap": ("host", {}),
    "gvisor": ("host", {"kernel": "gvisor"}),
    f"gvisor, `--pool {WARM}`": ("host", {"kernel": "gvisor", "pool": WARM}),
    "gvisor, `--prepared`": ("host", {"kernel": "gvisor", "prepared": True}),
}


@dataclass(frozen=True, slots=True)
class Group:
    """What a group took. `seconds`: until every server of every episode has answered a call."""

    seconds: float
    cpu_seconds: float
    mib: float

    def cells(self, episodes: int) -> tuple[str, ...]:
        figures = (self.seconds, self.cpu_seconds, self.cpu_seconds * 1e3 / episodes, self.mib)
        return tuple(f"{figure:,.{1 if figure < 100 else 0}f}" for figure in figures)


@asynccontextmanager
async def serving(
    options: argparse.Namespace, way: str, task: str, episodes: int
) -> AsyncGenerator[Decathlon]:
    provider, more = WAYS[way]
    image = options.docker_image if provider == "docker" else str(options.image)
    limits = {f"{name}_seconds": LONG_SECONDS for name in ("idle", "first_use", "servers", "set_up")}
    places = {"max_sandboxes": episodes + WARM, "max_queue": episodes, "drain_seconds": 5}
    with tempfile.TemporaryDirectory() as state:
        settings: dict[str, Any] = {**limits, **places, **more, "state": state, "image": image}
        settings |= {"snapshot_mib": 1 << 16}
        if task == "bare":
            # There is no tool to be called, and otherwise nothing waits until the task is set up.
            settings |= {"servers": "eager"}
        async with Decathlon.embedded(str(SUITE), provider, **settings) as d:
            yield d


async def call_servers(e: Episode) -> None:
    for tool in e.tools:
        if tool.name in CALLS:
            await e.call(tool.name, CALLS[tool.name])


async def measure_group(options: argparse.Namespace, way: str, task: str, episodes: int) -> Group:
    async with serving(options, way, task, episodes) as d:
        # The tool list is known from an earlier episode, and the pool is full.
        async with d.episode(task) as e:
            await call_servers(e)
        await anyio.sleep(WARM if WAYS[way][1].get("pool") else 1)
        memory, cpu, start = available_memory_mib(), busy_cpu_seconds(), time.perf_counter()
        # A launch time of its own: nothing of it is saved yet.
        async with d.lockstep([task] * episodes, launch_time=datetime.now(UTC)) as slots:
            if failures := [slot.failure for slot in slots if slot.failure is not None]:
                raise RuntimeError(f"{len(failures)} of {episodes} episodes were not opened: {failures[0]}")
            async with anyio.create_task_group() as tasks:
                for slot in slots:
                    tasks.start_soon(call_servers, slot.episode)
            seconds = time.perf_counter() - start
            return Group(seconds, busy_cpu_seconds() - cpu, (memory - available_memory_mib()) / episodes)


async def measure(options: argparse.Namespace) -> Iterator[str]:
    rows: list[str] = []
    for task in options.tasks:
        for episodes in options.episodes:
            for way in options.ways:
                group = await measure_group(options, way, task, episodes)
                rows.append(f"| {task} | {episodes} | {way} | {' | '.join(group.cells(episodes))} |")
                sys.stderr.write(f"{rows[-1]}\n")
    return page(rows)


def page(rows: list[str]) -> Iterator[str]:
    yield from (f"- {name}: {value}" for name, value in machine().items())
    yield ""
    yield "| task | episodes | way | all have answered, s | CPU, s | CPU of one, ms | memory of one, MiB |"
    yield "| --- | ---: | --- | ---: | ---: | ---: | ---: |"
    yield from rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--image", type=Path, metavar="DIR", required=True)
    parser.add_argument("--docker-image", default="decathlon-test:latest")
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--episodes", nargs="+", type=int, default=(64,))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    for line in anyio.run(measure, parser.parse_args()):
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
