"""Memory of the server for each idle episode, and of the machine for each live one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio

from benchmarks.figures import Figures, Target
from benchmarks.load import for_each, wire_sessions
from benchmarks.running import Run, UnavailableError, decathlon, started
from benchmarks.sizes import cache_tool_lists
from decathlon_mcp.http.server import COLLECT_SECONDS

IDLE_TARGET = Target("at most", 150.0)
WARM_UP_EPISODES = 16
"""Open before measuring, so that the server has imported and allocated what it needs in any case."""
MIN_SIZE = 64
"""Fewer episodes fit into memory that was allocated before; they are measured at once and have no target."""
DENSITY_SIZES = (64, 128)
"""Smallest and largest number of episodes to compare. Without merging, one of them takes 100 MiB.

More of them have one server each, not two, so that 1,024 fit into 24 GiB with merging.
"""
PHASES = {
    "open": "open all",
    "calls": "call each server once, which starts it",
    "settle": "merge pages",
    "grade": "claim and grade all",
    "close": "close all",
}
SETTLE_SECONDS = 60
"""How long the kernel may merge pages before memory is measured."""
KSM = Path("/sys/kernel/mm/ksm/run")


async def measure_memory(run: Run, figures: Figures) -> None:
    """Growth of the server's resident memory with the number of episodes that are open and idle."""
    size = max(2, *run.options.sizes)
    sandboxes = size + WARM_UP_EPISODES
    for _ in range(run.options.repeats):
        async with decathlon(run, max_sandboxes=sandboxes, max_queue=sandboxes) as server:
            await cache_tool_lists(server, "plain")
            async with wire_sessions([server.task("plain")] * WARM_UP_EPISODES) as warm_up:
                await server.wait_until_ready(WARM_UP_EPISODES)
                await _wait_until_idle(size)
                before_kib = server.memory_kib
                async with wire_sessions([server.task("plain")] * size) as episodes:
                    await server.wait_until_ready(sandboxes)
                    await _wait_until_idle(size)
                    figures.add(
                        "server memory per idle episode, connection included",
                        "KiB",
                        (server.memory_kib - before_kib) / size,
                        target=IDLE_TARGET if size >= MIN_SIZE else None,
                        size=size,
                    )
                    await for_each([one.end for one in (*warm_up, *episodes)])


async def _wait_until_idle(size: int) -> None:
    """Wait until the server has collected its garbage, as it does all the time."""
    if size >= MIN_SIZE:
        await anyio.sleep(COLLECT_SECONDS + 1)


async def measure_density(run: Run, figures: Figures) -> None:
    """Whole batches with two tool servers of the SDK in each episode, by `python -m benchmarks.many`."""
    smallest, largest = DENSITY_SIZES
    sizes = [size for size in run.options.sizes if size >= smallest]
    can_merge = _kernel_merges()
    if not can_merge:
        run.skipped["--merge-pages"] = f"the kernel does not merge pages: {KSM} is not 1"
    if not sizes:
        raise UnavailableError(f"no size is {smallest} or more")
    for size in sizes:
        servers = 2 if size <= largest else 1
        for merge_pages in (False, True):
            if (merge_pages and can_merge) or (not merge_pages and size <= largest):
                flags = ("--settle", str(SETTLE_SECONDS), *["--merge-pages"] * merge_pages)
                many = await run_many(run, size, servers, *flags)
                _add_many(figures, many, size, servers, merge_pages)


def _kernel_merges() -> bool:
    return KSM.exists() and KSM.read_text().strip() == "1"


def _add_many(figures: Figures, many: dict[str, Any], size: int, servers: int, merge_pages: bool) -> None:
    with_merging = "with `--merge-pages`" if merge_pages else "without merging"
    count = {1: "one server", 2: "two servers"}[servers]
    figures.add(
        f"memory per episode with {count}, {with_merging}",
        "MiB",
        many["available_mib"],
        size=size,
        plot="density",
    )
    # The kernel counts merged pages as shared between the processes that have them.
    figures.add(f"its processes' share of it, {with_merging}", "MiB", many["processes_mib"], size=size)
    figures.add(f"server memory per live episode, {with_merging}", "KiB", many["server_kib"], size=size)
    figures.add(f"lowest available memory on the way, {with_merging}", "MiB", many["lowest_mib"], size=size)
    for phase in ("open", "calls", "settle", "grade", "close"):
        figures.add(f"time to {PHASES[phase]}, {with_merging}", "s", many[f"{phase}_seconds"], size=size)
    for rate in ("openings", "gradings"):
        figures.add(f"{rate} per second, {with_merging}", "/s", many[f"{rate}_per_second"], size=size)
    counts = many["counts"]
    right = counts["graded"] - counts["wrong"]
    figures.add(
        f"graded correctly, {with_merging}",
        "",
        right,
        floor=("episodes", size),
        target=Target("at least", 1.0),
        size=size,
    )


async def run_many(run: Run, size: int, servers: int, *flags: str) -> dict[str, Any]:
    """What `python -m benchmarks.many` measures."""
    command = [sys.executable, "-m", "benchmarks.many", str(size), "--servers", str(servers), *flags]
    command += ["--image", run.options.image]
    with tempfile.TemporaryFile() as output:
        async with started(run, command, output=output.fileno(), errors=subprocess.DEVNULL) as process:
            status = await process.wait()
        output.seek(0)
        text = output.read().decode()
    if not text:
        raise RuntimeError(f"`python -m benchmarks.many {size}` ended with status {status}")
    result = json.loads(text)
    if status:
        raise RuntimeError(f"{result['counts']}"[:2000] + f", remaining: {result['remaining']}")
    return result
