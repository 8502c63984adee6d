"""A task with four MCP servers whose tool lists are known: they start when they are called, or at once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.figures import Figures, Target
from benchmarks.floors import open_drivers
from benchmarks.load import echo, for_each, wire_sessions
from benchmarks.machine import busy_cpu_seconds
from benchmarks.running import Run, Server, decathlon
from benchmarks.sizes import cache_tool_lists
from benchmarks.wire_client import WireClient

TASK = "four"
WHOLE_TARGET = Target("at most", 0.6)
OPEN_TARGET = Target("at most", 0.25)
RATE_TARGET = Target("at least", 0.7)
WHOLE = "CPU time of a whole episode: open, three calls on two of the servers, claim"
OPEN = "CPU time to open"
MAX_BATCH = 8
"""Episodes of which all four servers run, at 200 MiB each."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """CPU time is that of the whole machine, per episode."""

    open_cpu_seconds: float
    whole_cpu_seconds: float


async def measure_lazy(run: Run, figures: Figures) -> None:
    size = min(run.options.batch, MAX_BATCH)
    limits: dict[str, Any] = {"max_sandboxes": run.options.batch, "max_queue": run.options.batch}
    async with (
        decathlon(run, servers="lazy", **limits) as lazy,
        decathlon(run, servers="eager", **limits) as eager,
    ):
        await cache_tool_lists(lazy, TASK)
        for _ in range(run.options.repeats):
            batch, eager_batch = await _play(lazy, size), await _play(eager, size)
            for name, cpu, eager_cpu, target in (
                (WHOLE, batch.whole_cpu_seconds, eager_batch.whole_cpu_seconds, WHOLE_TARGET),
                (OPEN, batch.open_cpu_seconds, eager_batch.open_cpu_seconds, OPEN_TARGET),
            ):
                floor = ("`--servers eager`", eager_cpu * 1e3)
                figures.add(name, "ms", cpu * 1e3, floor=floor, target=target, size=size)
        for _ in range(run.options.repeats):
            await _measure_rate(run, figures, lazy, run.options.batch)


async def _play(server: Server, size: int) -> _Batch:
    """Open a batch at once, make three calls on two of the servers, and claim."""
    cpu = [busy_cpu_seconds()]
    async with wire_sessions([server.task(TASK)] * size) as episodes:
        await for_each([partial(one.request, "tools/list", {}) for one in episodes])
        await server.wait_until_ready(size)
        cpu.append(busy_cpu_seconds())
        await for_each([partial(_call_two_servers, one) for one in episodes])
        await for_each([partial(one.request, "tools/call", {"name": "claim_done"}) for one in episodes])
        cpu.append(busy_cpu_seconds())
        await for_each([one.end for one in episodes])
    await server.wait_until_empty()
    return _Batch((cpu[1] - cpu[0]) / size, (cpu[2] - cpu[0]) / size)


async def _call_two_servers(episode: WireClient) -> None:
    await echo(episode, "echo__echo")
    await echo(episode, "plain__echo")
    await echo(episode, "echo__echo")


async def _measure_rate(run: Run, figures: Figures, server: Server, size: int) -> None:
    start = time.perf_counter()
    async with wire_sessions([server.task(TASK)] * size) as episodes:
        await server.wait_until_ready(size)
        seconds = time.perf_counter() - start
        await for_each([one.end for one in episodes])
    await server.wait_until_empty()
    bare_seconds = await open_drivers(run, size)
    figures.add(
        "openings per second",
        "/s",
        size / seconds,
        floor=("bare loop: create, attach, start, driver ready", size / bare_seconds),
        target=RATE_TARGET,
        size=size,
    )
