"""What the start of a Python server costs: by itself, and as a fork of a process with its libraries.

`python -m benchmarks.servers [--rounds N] [--task TASK]` measures that and prints JSON. Many episodes at once
are measured by `python -m benchmarks.many N --provider host --servers 1 --warm-up --serve=--preload`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio

from benchmarks.figures import Figures
from benchmarks.machine import process_cpu_seconds
from benchmarks.memory import run_many
from benchmarks.running import Options, Run, Server, UnavailableError, decathlon
from benchmarks.samples import measure_in_turns
from benchmarks.wire_client import WireClient, wire_client
from decathlon_mcp.sandboxes.host.processes import read_children

CALLS: dict[str, dict[str, dict[str, Any]]] = {
    "note": {"notes__note": {"text": "right"}},
    "four": {
        "notes__note": {"text": "right"},
        "echo__echo": {"text": "right"},
        "git__git_status": {"repo_path": "/nowhere"},
        "excel__describe_sheet": {"path": "/nowhere", "sheet": "x"},
    },
}
"""A call of each server of a task, which starts it."""
LEARNT_SECONDS = 60.0
MAX_ROUNDS = 4
"""Of a repeat: four servers that start by themselves take four seconds of CPU."""
FORKED = "a server's CPU until its first reply, as a fork"
COLD = "started by itself"


class Turn:
    """One way of starting. Each episode makes a call of each server of the task."""

    def __init__(self, server: Server, task: str) -> None:
        self._server = server
        self._task = task
        self.cpu: list[float] = []
        self.private_mib: list[float] = []

    async def play(self) -> float:
        """Returns the seconds from `initialize` to the reply of the first call."""
        started, seconds = time.perf_counter(), 0.0
        async with wire_client(self._server.task(self._task)) as client:
            for name, arguments in CALLS[self._task].items():
                await client.request("tools/call", {"name": name, "arguments": arguments})
                seconds = seconds or time.perf_counter() - started
            processes = await anyio.to_thread.run_sync(servers_of, self._server.pid)
            self.cpu.append(sum(map(process_cpu_seconds, processes)))
            self.private_mib.append(sum(map(private_mib, processes)))
            await self._end(client)
        return seconds

    async def _end(self, client: WireClient) -> None:
        await client.end()
        await self._server.wait_until_empty()

    async def learn(self) -> None:
        """Let the tool lists be cached and the libraries be learnt. Raises UnavailableError."""
        await self.play()
        deadline = time.monotonic() + LEARNT_SECONDS
        while time.monotonic() < deadline:
            await self.play()
            # Learning is over when its servers become cheaper.
            if self.cpu[-1] < 0.5 * self.cpu[0]:
                return
            await anyio.sleep(1)
        raise UnavailableError(f"no server of the task {self._task} is a fork after {LEARNT_SECONDS:.0f} s")

    def clear(self) -> None:
        self.cpu.clear()
        self.private_mib.clear()


def servers_of(pid: int) -> list[int]:
    """The servers in sandboxes of a server: children of first processes of another pid namespace."""
    own, found, pending = _namespace(os.getpid()), list[int](), [pid]
    while pending:
        parent = pending.pop()
        for child in read_children(parent):
            inside = _namespace(parent) != own
            (found if inside else pending).append(child)
    return found


def _namespace(pid: int) -> str | None:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return None


def private_mib(pid: int) -> float:
    """Memory that a process has for itself."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


@asynccontextmanager
async def turns(run: Run, task: str) -> AsyncGenerator[dict[str, Turn]]:
    """Both ways of starting, each with a server of its own."""
    async with (
        decathlon(run, provider="host", isolation="namespaces") as cold,
        decathlon(run, provider="host", isolation="namespaces", preload=True) as forked,
    ):
        both = {"cold": Turn(cold, task), "preloaded": Turn(forked, task)}
        await both["cold"].play()
        await both["preloaded"].learn()
        yield both


async def measure(both: dict[str, Turn], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds, CPU seconds and MiB of an episode, by the way of starting."""
    for turn in both.values():
        turn.clear()
    samples = await measure_in_turns(
        {name: turn.play for name, turn in both.items()}, rounds=rounds, warm_up=0
    )
    return {
        name: {
            "first reply p50": samples[name].p50,
            "cpu": statistics.median(turn.cpu),
            "private MiB": statistics.median(turn.private_mib),
        }
        for name, turn in both.items()
    }


async def measure_servers(run: Run, figures: Figures) -> None:
    """A server of the SDK, and four servers, in both ways; one episode after another, and many at once."""
    rounds = min(run.options.openings, MAX_ROUNDS)
    for task in CALLS:
        async with turns(run, task) as both:
            for _ in range(run.options.repeats):
                found = await measure(both, rounds)
                cold, forked = found["cold"], found["preloaded"]
                of = f"task {task}: "
                figures.add(f"{of}{FORKED}", "ms", forked["cpu"] * 1e3, floor=(COLD, cold["cpu"] * 1e3))
                figures.add(
                    f"{of}`initialize` to the first reply of a tool: p50",
                    "ms",
                    forked["first reply p50"] * 1e3,
                    floor=(COLD, cold["first reply p50"] * 1e3),
                )
                figures.add(
                    f"{of}memory of its own", "MiB", forked["private MiB"], floor=(COLD, cold["private MiB"])
                )
    for size in run.options.sizes:
        seconds = [await _many_seconds(run, size, 1, preload) for preload in (False, True)]
        figures.add(
            "one server each, as forks: until all episodes had a reply",
            "s",
            seconds[1],
            floor=(COLD, seconds[0]),
            size=size,
            plot="servers",
        )
        figures.add(
            "four servers each, as forks: until all episodes had a reply of each",
            "s",
            await _many_seconds(run, size, 4, preload=True),
            size=size,
            plot="servers",
        )


async def _many_seconds(run: Run, size: int, servers: int, preload: bool) -> float:
    """From the first `initialize` to the last reply of episodes that start at once."""
    flags = ["--provider", "host", "--settle", "0", "--warm-up", *["--serve=--preload"] * preload]
    many = await run_many(run, size, servers, *flags)
    return many["open_seconds"] + many["calls_seconds"]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--task", choices=CALLS, default="note")
    arguments = parser.parse_args()
    run = Run(Options(), os.urandom(8).hex())
    async with turns(run, arguments.task) as both:
        found = await measure(both, arguments.rounds)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    anyio.run(main)
