"""Opening an episode without MCP servers, compared with `docker run` of the same image."""

from __future__ import annotations

import time
from dataclasses import dataclass

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from benchmarks.floors import docker_run
from benchmarks.running import Server
from benchmarks.samples import Samples, measure_in_turns, timed

SET_UP_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Openings:
    """`opened`: from `initialize` to the reply of `tools/list`; `removed`: until the sandbox is gone."""

    opened: Samples
    removed: Samples
    docker_run: Samples


async def open_episode(server: Server, task: str) -> float:
    """Return the seconds from `initialize` to the reply of `tools/list`, then end the episode."""
    async with httpx2.AsyncClient(timeout=SET_UP_SECONDS) as http:
        start = time.perf_counter()
        transport = streamable_http_client(server.task(task), http_client=http)
        async with Client(transport, mode="legacy") as client:
            await client.list_tools()
            return time.perf_counter() - start


async def measure_openings(server: Server, image: str, *, rounds: int, warm_up: int) -> Openings:
    """Open one episode at a time; like `removed`, `docker run --rm` waits until the container is gone."""
    removed: list[float] = []

    async def opening() -> float:
        start = time.perf_counter()
        seconds = await open_episode(server, "bare")
        await server.wait_until_empty()
        removed.append(time.perf_counter() - start)
        return seconds

    measurements = {"docker run": timed(lambda: docker_run(image)), "opening": opening}
    samples = await measure_in_turns(measurements, rounds=rounds, warm_up=warm_up)
    return Openings(samples["opening"], Samples(tuple(removed[warm_up:])), samples["docker run"])
