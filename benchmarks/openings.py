"""Opening an episode without servers, against `docker run` of the same image."""

from __future__ import annotations

import time
from dataclasses import dataclass

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from benchmarks.floors import docker_run
from benchmarks.running import Server
from benchmarks.samples import Samples, in_turns, timed

SET_UP_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Openings:
    """`episode`: from `initialize` to the answered `tools/list`; `whole`: until all is removed again."""

    episode: Samples
    whole: Samples
    run: Samples


async def open_episode(server: Server, task: str) -> float:
    """Seconds from `initialize` to the answered `tools/list`; then the client leaves, which ends it."""
    async with httpx2.AsyncClient(timeout=SET_UP_SECONDS) as http:
        began_at = time.perf_counter()
        transport = streamable_http_client(server.task(task), http_client=http)
        async with Client(transport, mode="legacy") as client:
            await client.list_tools()
            return time.perf_counter() - began_at


async def measure_openings(server: Server, image: str, *, rounds: int, warm_up: int) -> Openings:
    """One at a time. `docker run --rm` also waits until its container is removed; so does `whole`."""
    whole: list[float] = []

    async def episode() -> float:
        began_at = time.perf_counter()
        opened_after = await open_episode(server, "bare")
        await server.empty()
        whole.append(time.perf_counter() - began_at)
        return opened_after

    ways = {"run": timed(lambda: docker_run(image)), "episode": episode}
    taken = await in_turns(ways, rounds=rounds, warm_up=warm_up)
    return Openings(taken["episode"], Samples(tuple(whole[warm_up:])), taken["run"])
