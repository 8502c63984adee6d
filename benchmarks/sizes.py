"""Whole batches of 1 to 1,024 episodes: opened, called, claimed, graded and closed, next to their floors."""

from __future__ import annotations

import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from benchmarks.figures import Figures, Target
from benchmarks.floors import attached
from benchmarks.load import Load, closed_loop, echo, for_each, wire_sessions
from benchmarks.machine import available_memory_mib
from benchmarks.running import Run, Server, decathlon, tool_server
from benchmarks.wire_client import WireClient

SDK_SERVER_MAX_SIZE = 64
"""A tool server that imports the MCP SDK needs about 50 MiB and half a second of CPU time."""
TWICE_ABOVE_SIZE, ONCE_ABOVE_SIZE = 16, 64
"""Larger batches are measured twice or once: they take minutes, and are means over many episodes."""
CPU_TARGET = Target("at most", 0.75)
CALLS_TARGET = Target("at least", 0.8)
LABELS = {"plain": "standard library's server", "echo": "MCP SDK's server"}
"""The tool servers, each of a task of the same name."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch took. `memory_mib`: of the whole machine, when every episode has been called."""

    open_seconds: float
    played_seconds: float
    load: Load
    grade_seconds: float
    close_seconds: float
    memory_mib: float
    rewarded: int


async def measure_sizes(run: Run, figures: Figures) -> None:
    for size in run.options.sizes:
        for name in run.options.tool_servers:
            if name == "echo" and size > SDK_SERVER_MAX_SIZE:
                continue
            for _ in range(_repeats(run, size)):
                await _measure_size(run, figures, name, size)


def _repeats(run: Run, size: int) -> int:
    if size > ONCE_ABOVE_SIZE:
        return 1
    return min(2, run.options.repeats) if size > TWICE_ABOVE_SIZE else run.options.repeats


async def _measure_size(run: Run, figures: Figures, name: str, size: int) -> None:
    seconds = run.options.load_seconds
    async with tool_server(run) as tools, wire_sessions([tools.url] * size) as sessions:
        direct = await closed_loop(sessions, "echo", seconds=seconds, cpu=lambda: tools.cpu_seconds)
    bare, bare_played = await _measure_attached(run, name, size)
    batch = await _measure_batch(run, name, size)
    label = LABELS[name]
    floor = 1 / (1 / direct.calls_per_second + 1 / bare.calls_per_second)
    assert direct.cpu_seconds is not None
    assert batch.load.cpu_seconds is not None
    figures.add(
        f"calls per second, {label}",
        "/s",
        batch.load.calls_per_second,
        floor=("1/(1/a + 1/b)", floor),
        target=CALLS_TARGET if size in (64, 1024) else None,
        size=size,
        plot="calls",
    )
    figures.add(
        f"a: direct HTTP calls per second, compared with {label}", "/s", direct.calls_per_second, size=size
    )
    figures.add(f"b: attached streams, calls per second, {label}", "/s", bare.calls_per_second, size=size)
    figures.add(
        f"server CPU per call, {label}",
        "µs",
        batch.load.cpu_seconds * 1e6,
        floor=("SDK's server called directly", direct.cpu_seconds * 1e6),
        target=CPU_TARGET,
        size=size,
        plot="cpu",
    )
    figures.add(
        f"until every episode was called once, {label}",
        "s",
        batch.played_seconds,
        floor=("bare containers with the tool server", bare_played),
        size=size,
        plot="played",
    )
    figures.add(f"until every episode was ready, {label}", "s", batch.open_seconds, size=size)
    figures.add(
        f"episodes graded per second, {label}",
        "/s",
        size / batch.grade_seconds,
        floor=("episodes called once per second", size / batch.played_seconds),
        size=size,
        plot="graded",
    )
    figures.add(f"until all are closed, {label}", "s", batch.close_seconds, size=size)
    figures.add(
        f"memory of the machine per episode, {label}",
        "MiB",
        batch.memory_mib / size,
        size=size,
        plot="memory",
    )
    figures.add(
        f"rewards of 1.0, {label}",
        "",
        batch.rewarded,
        floor=("episodes", size),
        target=Target("at least", 1.0),
        size=size,
    )


async def _measure_attached(run: Run, name: str, size: int) -> tuple[Load, float]:
    """Calls over bare streams, and the seconds until every tool server has answered `initialize`."""
    start = time.perf_counter()
    async with attached(run, size, name) as servers:
        played = time.perf_counter() - start
        async with AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(server.concurrent()) for server in servers]
            load = await closed_loop(sessions, "echo", seconds=run.options.load_seconds)
    return load, played


async def _measure_batch(run: Run, name: str, size: int) -> Batch:
    async with decathlon(run, max_sandboxes=size, max_queue=size) as server:
        await cache_tool_lists(server, name)
        memory_before, times = available_memory_mib(), [time.perf_counter()]
        async with wire_sessions([server.task(name)] * size) as episodes:
            await for_each([partial(one.request, "tools/list", {}) for one in episodes])
            await server.wait_until_ready(size)
            times.append(time.perf_counter())
            await for_each([partial(echo, one, f"{name}__echo") for one in episodes])
            times.append(time.perf_counter())
            memory = memory_before - available_memory_mib()
            load = await closed_loop(
                episodes, f"{name}__echo", seconds=run.options.load_seconds, cpu=lambda: server.cpu_seconds
            )
            times.append(time.perf_counter())
            rewards: list[float] = []
            await for_each([partial(grade, one, rewards) for one in episodes])
            times.append(time.perf_counter())
            await for_each([one.end for one in episodes])
            await server.wait_until_empty()
            times.append(time.perf_counter())
    return Batch(
        open_seconds=times[1] - times[0],
        played_seconds=times[2] - times[0],
        load=load,
        grade_seconds=times[4] - times[3],
        close_seconds=times[5] - times[4],
        memory_mib=memory,
        rewarded=sum(reward == 1.0 for reward in rewards),
    )


async def cache_tool_lists(server: Server, task: str) -> None:
    """Play the first episode of a task, after which its tool lists are known."""
    async with wire_sessions([server.task(task)]) as (episode,):
        await episode.request("tools/list", {})
        await episode.end()
    await server.wait_until_empty()


async def grade(episode: WireClient, rewards: list[float]) -> None:
    """Claim and evaluate. A reward other than 1.0 is explained on stderr."""
    await episode.request("tools/call", {"name": "claim_done"})
    verdict = (await episode.request("tools/call", {"name": "evaluate"}))["structuredContent"]
    rewards.append(float(verdict["reward"]))
    if verdict["reward"] != 1.0:
        sys.stderr.write(f"reward {verdict['reward']}: {verdict['status']}: {verdict['detail']}\n")
