"""Many at once: calls a second over all sessions, and a batch from its first opening to nothing left."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import docker
from anyio.abc import TaskStatus
from decathlon_client import Decathlon, Episode

from benchmarks.calls import TEXT
from benchmarks.running import Running, Server, tool_server
from benchmarks.wire_client import WireClient, wire_client

OWNER_LABEL = "decathlon.owner"


@dataclass(frozen=True, slots=True)
class Load:
    """`cpu_seconds`: of the server that was called, for each call."""

    calls_per_second: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Times in seconds. `left`: what there still is of each kind once every episode is closed."""

    size: int
    open_seconds: float
    through: Load
    direct: Load
    rewarded: int
    grade_seconds: float
    close_seconds: float
    left: dict[str, int]


async def measure_batch(server: Server, *, size: int, load_seconds: float) -> Batch:
    """Open so many at once, load them all, claim and grade them all, close them all, count what is left."""
    async with tool_server("json") as tools:
        direct = await _load(tools, [tools.url] * size, "echo", load_seconds)
    times = [time.perf_counter()]
    async with Decathlon(server.url) as d:
        async with _opened(d, size) as episodes:
            times.append(time.perf_counter())
            urls = [server.episode(episode.id) for episode in episodes]
            through = await _load(server, urls, "echo__echo", load_seconds)
            times.append(time.perf_counter())
            rewards = await _graded(episodes)
            times.append(time.perf_counter())
        await server.empty()
        times.append(time.perf_counter())
    return Batch(
        size=size,
        open_seconds=times[1] - times[0],
        through=through,
        direct=direct,
        rewarded=sum(reward == 1.0 for reward in rewards),
        grade_seconds=times[3] - times[2],
        close_seconds=times[4] - times[3],
        left=await _left(server),
    )


@asynccontextmanager
async def _opened(d: Decathlon, size: int) -> AsyncGenerator[list[Episode]]:
    """Asked for all at once (the server bounds how many it opens at the same time), and so closed."""
    over = anyio.Event()

    async def hold(*, task_status: TaskStatus[Episode]) -> None:
        async with d.episode("echo") as episode:
            task_status.started(episode)
            await over.wait()

    async with anyio.create_task_group() as holders:
        episodes: list[Episode] = []

        async def start() -> None:
            episodes.append(await holders.start(hold))

        async with anyio.create_task_group() as starting:
            for _ in range(size):
                starting.start_soon(start)
        yield episodes
        over.set()


async def _load(server: Running, urls: Sequence[str], tool: str, seconds: float) -> Load:
    """A session at each address, making one call after the other, all side by side."""
    counts: list[int] = []

    async def play(client: WireClient, until: float) -> None:
        count = 0
        while time.perf_counter() < until:
            result = await client.ask("tools/call", {"name": tool, "arguments": {"text": TEXT}})
            assert result["content"] == [{"type": "text", "text": TEXT}]
            count += 1
        counts.append(count)

    async with AsyncExitStack() as sessions:
        clients = [await sessions.enter_async_context(wire_client(url)) for url in urls]
        until, cpu_before = time.perf_counter() + seconds, server.cpu_seconds
        async with anyio.create_task_group() as players:
            for client in clients:
                players.start_soon(play, client, until)
        cpu_seconds = server.cpu_seconds - cpu_before
    return Load(sum(counts) / seconds, cpu_seconds / sum(counts))


async def _graded(episodes: Sequence[Episode]) -> list[float]:
    rewards: list[float] = []

    async def grade(episode: Episode) -> None:
        await episode.claim_done()
        rewards.append((await episode.evaluate()).reward)

    async with anyio.create_task_group() as graders:
        for episode in episodes:
            graders.start_soon(grade, episode)
    return rewards


async def _left(server: Server) -> dict[str, int]:
    """Of episodes and sandboxes by the server's count, of containers by the engine's, of files by ours."""
    health = await server.health()
    api: Any = docker.APIClient()
    filters = {"label": f"{OWNER_LABEL}={server.owner}"}
    containers = await anyio.to_thread.run_sync(lambda: api.containers(all=True, filters=filters))
    api.close()
    return {
        "episodes": int(health["episodes"]),
        "sandboxes": int(health["sandboxes"]),
        "containers": len(containers),
    }
