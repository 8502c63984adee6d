"""Thousands of short episodes on one server, whose memory and descriptors must not grow."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import httpx2

from benchmarks.survival.running import Leftovers, killable_server
from benchmarks.wire_client import WireClient, wire_client

SoakProvider = Literal["fake", "docker", "host"]
Ending = Literal["closed", "vanished", "cancelled a call", "failed"]

VANISHING = 0.05
"""Part of the clients whose connection is cut during a call."""
CANCELLING = 0.05
"""Part of the clients that cancel a call, and play on."""
IDLE_SECONDS = 5
SAMPLES = 200
"""Number of samples of the server in a run."""
WARM_UP = 0.1
"""Part of the run before slopes are measured."""
START_SECONDS = 60.0
END_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The server when this many episodes were played."""

    episodes: int
    memory_mib: float
    descriptors: int
    threads: int


@dataclass(slots=True)
class Soak:
    """What the server needed over the run, and how the episodes ended."""

    provider: SoakProvider
    episodes: int
    at_once: int
    samples: list[Sample] = field(default_factory=list[Sample])
    endings: Counter[Ending] = field(default_factory=Counter[Ending])
    errors: list[str] = field(default_factory=list[str])
    seconds: float = 0.0
    open_at_end: int = 0
    leftovers: Leftovers | None = None

    @property
    def steady(self) -> list[Sample]:
        """The samples after the warm-up."""
        return [sample for sample in self.samples if sample.episodes >= self.episodes * WARM_UP]

    def slope(self, values: Sequence[float]) -> float:
        """Growth per 1,000 episodes of values of the steady samples, by least squares."""
        return statistics.linear_regression([sample.episodes / 1000 for sample in self.steady], values).slope


@asynccontextmanager
async def _server(soak: Soak) -> AsyncGenerator[tuple[str, int]]:
    """Run the server; its URL and pid."""
    leases = {"idle_seconds": IDLE_SECONDS, "first_use_seconds": IDLE_SECONDS, "grace_seconds": 2}
    sizes = {"max_sandboxes": soak.at_once * 2, "max_queue": soak.at_once * 4}
    if soak.provider != "fake":
        flags = [
            part
            for name, value in (leases | sizes).items()
            for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        async with killable_server(soak.provider, *flags) as server:
            pid = server.process.server_pid
            assert pid is not None
            yield server.url, pid
        soak.leftovers = server.leftovers[0]
        return
    with tempfile.TemporaryDirectory(prefix="decathlon-soak-") as name:
        ready = Path(name) / "ready"
        options = json.dumps(leases | sizes)
        command = [
            sys.executable,
            "-m",
            "benchmarks.survival.fake_server",
            f"{name}/state",
            str(ready),
            options,
        ]
        async with await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=None) as process:
            try:
                with anyio.fail_after(START_SECONDS):
                    while not (ready.exists() and ready.read_text()):  # noqa: ASYNC110
                        await anyio.sleep(0.05)
                yield ready.read_text(), process.pid
            finally:
                process.terminate()
                with anyio.CancelScope(shield=True):
                    await process.wait()


async def measure_soak(provider: SoakProvider, *, episodes: int, at_once: int) -> Soak:
    """Play episodes; each has its number's own random choices."""
    soak = Soak(provider, episodes, at_once)
    numbers = iter(range(episodes))
    every = max(1, episodes // SAMPLES)
    async with _server(soak) as (url, pid):

        async def work() -> None:
            for number in numbers:
                soak.endings[await _play(soak, url, random.Random(number))] += 1
                if soak.endings.total() % every == 0:
                    soak.samples.append(_sample(pid, soak.endings.total()))

        start = time.perf_counter()
        async with anyio.create_task_group() as workers:
            for _ in range(at_once):
                workers.start_soon(work)
        soak.seconds = time.perf_counter() - start
        with anyio.move_on_after(END_SECONDS):
            while await _open_episodes(url):  # noqa: ASYNC110
                await anyio.sleep(0.2)
        soak.open_at_end = await _open_episodes(url)
    return soak


async def _open_episodes(url: str) -> int:
    async with httpx2.AsyncClient() as client:
        return int((await client.get(f"{url}/healthz")).json()["episodes"])


def _sample(pid: int, episodes: int) -> Sample:
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    descriptors = len([*Path(f"/proc/{pid}/fd").iterdir()])
    return Sample(episodes, int(fields["VmRSS"].split()[0]) / 1024, descriptors, int(fields["Threads"]))


async def _play(soak: Soak, url: str, rng: random.Random) -> Ending:
    try:
        async with wire_client(f"{url}/tasks/find-answer/mcp") as client:
            await client.request("tools/list", {})
            for _ in range(rng.randrange(1, 4)):
                await _call(client, "probe__echo", {"text": "x" * rng.randrange(2000)})
            draw = rng.random()
            if draw < VANISHING:
                with anyio.move_on_after(rng.uniform(0, 0.2)):
                    await _call(client, "probe__sleep", {"seconds": 5})
                return "vanished"
            if draw < VANISHING + CANCELLING:
                await _cancel_a_call(client)
                async with client.sibling() as again:
                    await _finish(again)
                return "cancelled a call"
            await _finish(client)
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        soak.errors.append(f"{type(error).__name__}: {error}"[:200])
        return "failed"
    return "closed"


async def _finish(client: WireClient) -> None:
    await _call(client, "claim_done", {})
    verdict = await _call(client, "evaluate", {})
    if verdict.get("structuredContent", {}).get("status") != "scored":
        raise RuntimeError(f"no score: {verdict}")
    await client.end()


async def _cancel_a_call(client: WireClient) -> None:
    """Cancel a call that runs; its reply, if there is one, is not read."""

    async def call() -> None:
        with suppress(OSError, EOFError, RuntimeError, ValueError):
            await _call(client, "probe__sleep", {"seconds": 5})

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await anyio.sleep(0.1)
        await client.cancel_last()
        tasks.cancel_scope.cancel()


async def _call(client: WireClient, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return await client.request("tools/call", {"name": name, "arguments": arguments})
