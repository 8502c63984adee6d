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


@dataclass(frozen=True, slots=True)
class Openings:
    """`episode`: from `initialize` to the answered `tools/list`; `whole`: until all is removed again."""

    episode: Samples
    whole: Samples
    run: Samples


async def measure_openings(server: Server, image: str, *, rounds: int, warm_up: int) -> Openings:
    """One at a time. `docker run --rm` also waits until its container is removed; so does `whole`."""
    whole: list[float] = []

    async def open_episode() -> float:
        async with httpx2.AsyncClient() as http:
            began_at = time.perf_counter()
            transport = streamable_http_client(server.task("bare"), http_client=http)
            async with Client(transport, mode="legacy") as client:
                await client.list_tools()
                opened_after = time.perf_counter() - began_at
        await server.empty()
        whole.append(time.perf_counter() - began_at)
        return opened_after

    ways = {"run": timed(lambda: docker_run(image)), "episode": open_episode}
    taken = await in_turns(ways, rounds=rounds, warm_up=warm_up)
    return Openings(taken["episode"], Samples(tuple(whole[warm_up:])), taken["run"])
