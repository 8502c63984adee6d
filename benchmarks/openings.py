"""Openings and gradings without MCP servers, compared with `docker run` and with each other."""

from __future__ import annotations

import time
from functools import partial

from benchmarks.figures import Figures, Target
from benchmarks.floors import docker_run
from benchmarks.load import for_each, wire_sessions
from benchmarks.running import Run, Server, decathlon
from benchmarks.samples import Samples, measure_in_turns, timed
from benchmarks.sizes import grade
from benchmarks.wire_client import wire_client

POOL_METRIC = "decathlon_pool_idle"
COLD_TARGET = Target("at most", 0.5)
GRADING_TARGET = Target("at least", 0.7)
DOCKER_RUN = "`docker run --rm --network none IMAGE python3 -c pass`"


async def measure_openings(run: Run, figures: Figures) -> None:
    """Open one episode at a time; as `removed`, `docker run --rm` waits until the container is gone."""
    # A tool list that is known is sent before the sandbox is open, unless all servers start at set-up.
    async with decathlon(run, servers="eager") as server:
        removed: list[float] = []

        async def opening() -> float:
            start = time.perf_counter()
            seconds = await open_episode(server, "bare")
            await server.wait_until_empty()
            removed.append(time.perf_counter() - start)
            return seconds

        measurements = {"docker run": timed(lambda: docker_run(run)), "opening": opening}
        await measure_in_turns(measurements, rounds=1, warm_up=0)
        for _ in range(run.options.repeats):
            removed.clear()
            samples = await measure_in_turns(measurements, rounds=run.options.openings, warm_up=0)
            floor = samples["docker run"]
            for name, of, target in (
                ("`initialize` to the tool list", samples["opening"], COLD_TARGET),
                ("`initialize` until the sandbox is removed", Samples(tuple(removed)), None),
            ):
                figures.add(
                    f"{name}: p50", "ms", of.p50 * 1e3, floor=(DOCKER_RUN, floor.p50 * 1e3), target=target
                )


async def open_episode(server: Server, task: str) -> float:
    """Return the seconds from `initialize` to the reply of `tools/list`, then end the episode."""
    start = time.perf_counter()
    async with wire_client(server.task(task)) as client:
        await client.request("tools/list", {})
        seconds = time.perf_counter() - start
        await client.end()
    return seconds


async def measure_gradings(run: Run, figures: Figures) -> None:
    """Open a batch of episodes without servers at once, then claim and grade all of them at once.

    With sandboxes opened ahead, the graders' are, while the episodes are open.
    """
    size = run.options.batch
    async with (
        decathlon(run, max_sandboxes=size, max_queue=size) as cold,
        decathlon(run, max_sandboxes=2 * size, max_queue=size, pool=size) as warm,
    ):
        for server in (cold, warm):
            await open_episode(server, "bare")
        for _ in range(run.options.repeats):
            openings, gradings = await _grade_batch(cold, size)
            floor = ("openings per second without servers", openings)
            figures.add("gradings per second of a trivial evaluator", "/s", gradings, floor=floor, size=size)
            _, gradings = await _grade_batch(warm, size, pooled=size)
            figures.add(
                "gradings per second of a trivial evaluator, graders' sandboxes opened ahead",
                "/s",
                gradings,
                floor=floor,
                target=GRADING_TARGET,
                size=size,
            )


async def _grade_batch(server: Server, size: int, *, pooled: int = 0) -> tuple[float, float]:
    """Openings and gradings per second. `pooled`: how many sandboxes must be open ahead before grading."""
    await server.wait_until_empty()
    start, rewards = time.perf_counter(), list[float]()
    async with wire_sessions([server.task("bare")] * size) as episodes:
        await server.wait_until_ready(size)
        opened = time.perf_counter()
        await server.wait_for_metric(POOL_METRIC, pooled)
        claimed = time.perf_counter()
        await for_each([partial(grade, one, rewards) for one in episodes])
        graded = time.perf_counter()
        await for_each([one.end for one in episodes])
    if rewards != [1.0] * size:
        raise RuntimeError(f"unexpected rewards: {rewards}")
    return size / (opened - start), size / (graded - claimed)
