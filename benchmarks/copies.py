"""States of episodes on gVisor: saving them, branches as copies of them, and branches by calls made again.

    python -m benchmarks.copies --image DIR    # an unpacked image with the MCP SDK

Prints a table. The machine should be idle.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import anyio
from decathlon_client import Decathlon, Episode

from benchmarks.machine import available_memory_mib, machine
from benchmarks.running import SUITE
from decathlon_mcp.sandboxes.capabilities import Snapshot
from decathlon_mcp.types import public_id

TASKS = {
    "plain": "a server of the standard library",
    "echo": "a server on the MCP SDK",
}
CALLS = (1, 10, 50)
COPIES = (1, 8)


@asynccontextmanager
async def opened(d: Decathlon, task: str, seconds: list[float] | None = None) -> AsyncGenerator[Episode]:
    """An episode of the task whose servers have all answered; `seconds` gets how long that took."""
    start = time.perf_counter()
    async with d.episode(task) as e:
        await answered(e)
        if seconds is not None:
            seconds.append(time.perf_counter() - start)
        yield e


async def answered(e: Episode) -> None:
    for tool in e.tools:
        if tool.name.endswith("echo"):
            await e.call(tool.name, {"text": "x"})


async def measure_task(d: Decathlon, state: Path, task: str, rounds: int) -> dict[str, float]:
    """Milliseconds and MiB by step."""
    steps: dict[str, list[float]] = {
        "open and a call, without a state": [],
        "save": [],
        "branch and a call": [],
    }
    figures: dict[str, float] = {}
    size_bytes = 0
    for _ in range(rounds):
        async with opened(d, task, steps["open and a call, without a state"]) as e:
            start = time.perf_counter()
            at = await d.snapshot(e)
            steps["save"].append(time.perf_counter() - start)
            start = time.perf_counter()
            async with d.branch(e, at=at) as b:
                await answered(b)
                steps["branch and a call"].append(time.perf_counter() - start)
            (folder,) = [
                path for path in (state / "episodes").iterdir() if public_id(path.name) == e.public_id
            ]
            size_bytes = Snapshot(folder / "snapshots" / str(at)).size_bytes
    figures |= {f"{step}, ms": median(seconds) * 1e3 for step, seconds in steps.items()}
    figures["size of a state, MiB"] = size_bytes / (1 << 20)
    async with opened(d, task) as e:
        at = await d.snapshot(e)
        for count in COPIES:
            before, start = available_memory_mib(), time.perf_counter()
            async with d.branch(e, at=at, count=count) as branches:
                for slot in branches:
                    await answered(slot.episode)
                if count > 1:
                    figures[f"{count} branches at once, ms"] = (time.perf_counter() - start) * 1e3
                figures[f"memory of a copy, of {count}, MiB"] = (before - available_memory_mib()) / count
    return figures


async def measure_calls(d: Decathlon, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a branch after so many calls, by copy and by calls made again."""
    found: dict[str, dict[str, float]] = {}
    async with AsyncExitStack() as stack:
        saved = await stack.enter_async_context(d.episode("echo"))
        plain = await stack.enter_async_context(d.episode("echo"))
        for call in range(1, max(CALLS) + 1):
            for e in (saved, plain):
                await e.call("echo__echo", {"text": "x" * 100})
            if call in CALLS:
                await d.snapshot(saved)
                for name, e in (("a copy", saved), ("calls made again", plain)):
                    seconds: list[float] = []
                    for _ in range(rounds):
                        start = time.perf_counter()
                        async with d.branch(e, at=call) as b:
                            seconds.append(time.perf_counter() - start)
                            await b.call("echo__echo", {"text": "x"})
                    found.setdefault(f"branch after call {call}, ms", {})[name] = median(seconds) * 1e3
    return found


async def measure(image: Path, rounds: int) -> Iterator[str]:
    """The lines of the page."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"state": folder, "image": str(image), "drain_seconds": 5}
        async with Decathlon.embedded(str(SUITE), "host", kernel="gvisor", **settings) as d:
            tasks = {task: await measure_task(d, Path(folder), task, rounds) for task in TASKS}
            calls = await measure_calls(d, rounds)
    return page(tasks, calls)


def page(tasks: dict[str, dict[str, float]], calls: dict[str, dict[str, float]]) -> Iterator[str]:
    yield from (f"- {name}: {value}" for name, value in machine().items())
    yield ""
    yield f"| | {' | '.join(TASKS.values())} |"
    yield f"| --- |{' ---: |' * len(TASKS)}"
    for step in tasks["plain"]:
        yield f"| {step} | {' | '.join(f'{tasks[task][step]:.0f}' for task in TASKS)} |"
    yield ""
    yield "| one server on the MCP SDK | a copy | calls made again |"
    yield "| --- | ---: | ---: |"
    for step, values in calls.items():
        yield f"| {step} | {' | '.join(f'{value:.0f}' for value in values.values())} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--image", type=Path, metavar="DIR", required=True)
    options = parser.parse_args()
    for line in anyio.run(measure, options.image, options.rounds):
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
