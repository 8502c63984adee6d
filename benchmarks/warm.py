"""Sandboxes that were opened ahead: from `initialize` to the first tool result, warm and cold."""

from __future__ import annotations

import time

from benchmarks.figures import Figures, Target
from benchmarks.load import echo
from benchmarks.running import Run, Server, decathlon
from benchmarks.samples import measure_in_turns
from benchmarks.sizes import LABELS, cache_tool_lists
from benchmarks.wire_client import wire_client

TARGET = Target("at most", 0.5)
WARM = 2
POOL_METRIC = "decathlon_pool_idle"


async def measure_warm(run: Run, figures: Figures) -> None:
    async with decathlon(run, pool=WARM) as warm, decathlon(run) as cold:
        for name in run.options.tool_servers:
            for server in (warm, cold):
                await cache_tool_lists(server, name)

            async def measure_warm(task: str = name) -> float:
                await warm.wait_for_metric(POOL_METRIC, WARM)
                return await _first_result(warm, task)

            async def measure_cold(task: str = name) -> float:
                return await _first_result(cold, task)

            for _ in range(run.options.repeats):
                samples = await measure_in_turns(
                    {"warm": measure_warm, "cold": measure_cold}, rounds=run.options.openings, warm_up=0
                )
                figures.add(
                    f"`initialize` to the first tool result, {LABELS[name]}: p50",
                    "ms",
                    samples["warm"].p50 * 1e3,
                    floor=("the same, opened when needed", samples["cold"].p50 * 1e3),
                    # A server on the SDK needs most of the time to start, warm or cold.
                    target=TARGET if name == "plain" else None,
                )


async def _first_result(server: Server, task: str) -> float:
    start = time.perf_counter()
    async with wire_client(server.task(task)) as client:
        await client.request("tools/list", {})
        await echo(client, f"{task}__echo")
        seconds = time.perf_counter() - start
        await client.end()
    await server.wait_until_empty()
    return seconds
