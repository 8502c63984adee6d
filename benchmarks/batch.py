"""Concurrent episodes: calls per second over all sessions, and the time to open, grade and close a batch."""

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
from benchmarks.running import Server, ServerProcess, tool_server
from benchmarks.wire_client import WireClient, wire_client

OWNER_LABEL = "decathlon.owner"


@dataclass(frozen=True, slots=True)
class Load:
    """`cpu_seconds`: CPU time of the called server per call."""

    calls_per_second: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Batch:
    """`remaining`: what still exists of each kind after all episodes are closed."""

    size: int
    open_seconds: float
    through: Load
    direct: Load
    rewarded: int
    grade_seconds: float
    close_seconds: float
    remaining: dict[str, int]


async def measure_batch(server: Server, *, size: int, load_seconds: float) -> Batch:
    """Open all episodes concurrently, load them, grade them, close them, and count what remains."""
    async with tool_server("json") as tools:
        direct = await _load(tools, [tools.url] * size, "echo", load_seconds)
    times = [time.perf_counter()]
    async with Decathlon(server.url) as d:
        async with _open_episodes(d, size) as episodes:
            times.append(time.perf_counter())
            urls = [server.episode(episode.id) for episode in episodes]
            through = await _load(server, urls, "echo__echo", load_seconds)
            times.append(time.perf_counter())
            rewards = await _grade(episodes)
            times.append(time.perf_counter())
        await server.wait_until_empty()
        times.append(time.perf_counter())
    return Batch(
        size=size,
        open_seconds=times[1] - times[0],
        through=through,
        direct=direct,
        rewarded=sum(reward == 1.0 for reward in rewards),
        grade_seconds=times[3] - times[2],
        close_seconds=times[4] - times[3],
        remaining=await _count_remaining(server),
    )


@asynccontextmanager
async def _open_episodes(d: Decathlon, size: int) -> AsyncGenerator[list[Episode]]:
    """Open and close all episodes concurrently; the server limits how many it opens at the same time."""
    finished = anyio.Event()

    async def hold(*, task_status: TaskStatus[Episode]) -> None:
        async with d.episode("echo") as episode:
            task_status.started(episode)
            await finished.wait()

    async with anyio.create_task_group() as holders:
        episodes: list[Episode] = []

        async def start() -> None:
            episodes.append(await holders.start(hold))

        async with anyio.create_task_group() as starting:
            for _ in range(size):
                starting.start_soon(start)
        yield episodes
        finished.set()


async def _load(server: ServerProcess, urls: Sequence[str], tool: str, seconds: float) -> Load:
    """Make calls one after the other in a session per URL, all sessions concurrently."""
    counts: list[int] = []

    async def play(client: WireClient, until: float) -> None:
        count = 0
        while time.perf_counter() < until:
            result = await client.request("tools/call", {"name": tool, "arguments": {"text": TEXT}})
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


async def _grade(episodes: Sequence[Episode]) -> list[float]:
    rewards: list[float] = []

    async def grade(episode: Episode) -> None:
        await episode.claim_done()
        rewards.append((await episode.evaluate()).reward)

    async with anyio.create_task_group() as graders:
        for episode in episodes:
            graders.start_soon(grade, episode)
    return rewards


async def _count_remaining(server: Server) -> dict[str, int]:
    """Return the server's counts of episodes and sandboxes, and the engine's count of containers."""
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
