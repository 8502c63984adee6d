"""Sandboxes of gVisor that are saved and stopped while they wait for their model: what it frees and costs.

    python -m benchmarks.suspending --image DIR    # an unpacked image with the MCP SDK

The server does not do this. Each sandbox has one server on the MCP SDK and gets a call, a request to that
server, each so many seconds. First the sandboxes stay open; then each is saved and removed after a reply, and
opened from its state for the next call. Prints a table. The machine should be idle: CPU time and memory are
those of the whole machine.
"""

from __future__ import annotations

import argparse
import math
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import cast

import anyio
import anyio.to_thread
from decathlon_sandbox import wire

from benchmarks.machine import available_memory_mib, busy_cpu_seconds, machine
from benchmarks.running import START_SECONDS, SUITE, TOOL_SERVER
from decathlon_mcp.app import sandbox_factories
from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.plugins.branches.copies import open_copy
from decathlon_mcp.plugins.branches.states import SavedState
from decathlon_mcp.sandboxes.capabilities import SavedSandbox
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.lock import create_state_folder
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.types import JsonObject
from tests.fakes.calls import call_server

SERVER = "echo"
KEPT, SUSPENDED, ALONE = "kept open", "suspended", "suspended, one without pause"
CALL_SECONDS = 60.0
SETTLE_SECONDS = 3.0
"""Before memory is read: the kernel has taken back that of processes that were killed."""
ALONE_SECONDS = 12.0
AT_ONCE, AT_ONCE_SECONDS = 8, 20.0
"""Sandboxes that are called without pause, to find how many the machine can wake in a second."""
GOAL_EPISODES, GOAL_INTERVAL_SECONDS = 256, 30.0
"""For which the cost is computed from what was measured."""
MIB = 1 << 20
Call = Callable[[Callable[[], None]], Awaitable[None]]
"""Makes one call; calls its argument when that is answered, and may do more then."""


@dataclass(slots=True)
class Phase:
    """Calls of some sandboxes in one way.

    `interval_seconds`: 0 is without pause. `seconds`: for which calls are made, then how long that took.
    `latencies`: seconds from when a call was due to its reply.
    """

    calls: Sequence[Call]
    interval_seconds: float
    seconds: float
    latencies: list[float] = field(default_factory=list[float])
    due: int = 0
    """How many calls would have been made if each had been answered at once; 0 without pause."""
    cpu_seconds: float = 0.0

    async def play(self) -> None:
        cpu_seconds, start = busy_cpu_seconds(), time.perf_counter()
        # The same moments in every phase.
        offsets = random.Random(0)
        async with anyio.create_task_group() as tasks:
            for call in self.calls:
                offset = offsets.uniform(0, self.interval_seconds)
                if self.interval_seconds:
                    self.due += max(0, math.ceil((self.seconds - offset) / self.interval_seconds))
                tasks.start_soon(self._repeat, call, anyio.current_time(), offset)
            await anyio.sleep(self.seconds)
        # Calls that were made in time are finished.
        self.seconds = time.perf_counter() - start
        self.cpu_seconds = busy_cpu_seconds() - cpu_seconds

    async def _repeat(self, call: Call, start: float, offset: float) -> None:
        due = start + offset

        def answered() -> None:
            nonlocal due
            now = anyio.current_time()
            self.latencies.append(now - due)
            # A model makes no other call before it has the reply.
            due = max(due + self.interval_seconds, now)

        while max(due, anyio.current_time()) < start + self.seconds:
            await anyio.sleep_until(due)
            await call(answered)


@dataclass(slots=True)
class Sandboxes:
    """Opens, saves and opens again, as the server does. `seconds`: how long each step took."""

    factory: SandboxFactory
    folder: Path
    opening: anyio.CapacityLimiter
    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    @contextmanager
    def step(self, name: str) -> Generator[None]:
        start = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)

    @asynccontextmanager
    async def opened(
        self, state: SavedState | None = None
    ) -> AsyncGenerator[tuple[SavedSandbox, DriverClient]]:
        """A sandbox whose server has answered, or one as it was saved."""
        spec = self.factory.spec(f"suspending-{secrets.token_hex(8)}", "none")
        if state is None:
            new = self.factory.open_new(spec, self.opening)
        else:
            new = open_copy(self.factory, state, self.opening, spec)
        async with new as (sandbox, driver):
            if state is None:
                command: JsonObject = {"command": "python3", "args": ["-c", TOOL_SERVER.read_text()]}
                await driver.define([{"name": SERVER, **command, "env": {}, "inherit": "all", "cwd": "/"}])
                await driver.start([SERVER], deadline_seconds=START_SECONDS)
                await request(driver)
            yield cast("SavedSandbox", sandbox), driver

    async def save(self, sandbox: SavedSandbox, driver: DriverClient) -> SavedState:
        await driver.ping(saving=True)
        with driver.quiet():
            snapshot = await sandbox.snapshot(self.folder / secrets.token_hex(8))
        return SavedState(
            folder=snapshot.folder,
            at=0,
            provider=self.factory.provider.name,
            wire_version=wire.VERSION,
            generation=driver.generation,
            size_bytes=snapshot.size_bytes,
            sealed=False,
        )

    def suspended(self, state: SavedState) -> Call:
        """Calls of a sandbox that is only there for the call and until it is saved."""

        async def call(answered: Callable[[], None]) -> None:
            nonlocal state
            async with AsyncExitStack() as stack:
                with self.step("open from its state"):
                    sandbox, driver = await stack.enter_async_context(self.opened(state))
                with self.step("call"):
                    await request(driver)
                answered()
                with self.step("save"):
                    saved = await self.save(sandbox, driver)
                with self.step("remove"):
                    await stack.aclose()
            # One state of each sandbox is on the disk.
            await anyio.to_thread.run_sync(shutil.rmtree, state.folder)
            state = saved

        return call


async def request(driver: DriverClient) -> None:
    """A request to the server in a sandbox, and its reply."""
    with anyio.fail_after(CALL_SECONDS):
        await call_server(driver, SERVER, {"name": "echo", "arguments": {"text": "again"}})


def kept(driver: DriverClient) -> Call:
    async def call(answered: Callable[[], None]) -> None:
        await request(driver)
        answered()

    return call


@dataclass(frozen=True, slots=True)
class Results:
    """`memory_mib`: of one sandbox that waits, by mode. `step_seconds`: of one sandbox alone."""

    phases: dict[str, Phase]
    memory_mib: dict[str, float]
    state_bytes: float
    step_seconds: dict[str, float]


async def measure(image: Path, episodes: int, interval: float, seconds: float) -> Results:
    with tempfile.TemporaryDirectory() as name:
        state, folder = Path(name) / "state", Path(name) / "states"
        folder.mkdir()
        values = {"provider": "host", "kernel": "gvisor", "image": str(image), "state": state}
        settings = Settings.model_validate(values)
        create_state_folder(state)
        suite, owner = load_suite(SUITE), f"suspending-{secrets.token_hex(4)}"
        async with sandbox_factories([suite], owner, settings, state / "scratch") as factories:
            opening = anyio.CapacityLimiter(settings.max_opening)
            sandboxes = Sandboxes(factories[suite.name], folder, opening)
            return await _measure(sandboxes, episodes, interval, seconds)


async def _measure(sandboxes: Sandboxes, episodes: int, interval: float, seconds: float) -> Results:
    phases: dict[str, Phase] = {}
    async with sandboxes.opened():
        pass  # what the first one loads into this process, the others do not
    before_mib = await _available_mib()
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(sandboxes.opened()) for _ in range(episodes)]
        kept_mib = before_mib - await _available_mib()
        phases[KEPT] = Phase([kept(driver) for _, driver in opened], interval, seconds)
        await phases[KEPT].play()
        states = [await sandboxes.save(*one) for one in opened]
    suspended_mib = before_mib - await _available_mib()
    calls = [sandboxes.suspended(state) for state in states]
    sandboxes.seconds.clear()
    phases[ALONE] = Phase(calls[:1], 0, ALONE_SECONDS)
    await phases[ALONE].play()
    step_seconds = {step: median(values) for step, values in sandboxes.seconds.items()}
    phases[SUSPENDED] = Phase(calls, interval, seconds)
    await phases[SUSPENDED].play()
    at_once = calls[:AT_ONCE]
    phases[f"suspended, {len(at_once)} without pause"] = without_pause = Phase(at_once, 0, AT_ONCE_SECONDS)
    await without_pause.play()
    memory_mib = {KEPT: kept_mib / episodes, SUSPENDED: suspended_mib / episodes}
    return Results(phases, memory_mib, sum(state.size_bytes for state in states) / episodes, step_seconds)


async def _available_mib() -> float:
    await anyio.sleep(SETTLE_SECONDS)
    return available_memory_mib()


def page(results: Results) -> Iterator[str]:
    """The lines of the results' page."""
    phases = results.phases
    yield from (f"- {name}: {value}" for name, value in machine().items())
    yield ""
    yield f"| | {' | '.join(phases)} |"
    yield f"| --- |{' ---: |' * len(phases)}"
    rows: dict[str, Callable[[str, Phase], str]] = {
        "sandboxes": lambda _, phase: f"{len(phase.calls)}",
        "seconds between calls": lambda _, phase: f"{phase.interval_seconds:.0f}",
        "calls due": lambda _, phase: f"{phase.due or '–'}",
        "calls answered": lambda _, phase: f"{len(phase.latencies)}",
        "calls answered per second": lambda _, phase: f"{len(phase.latencies) / phase.seconds:.2f}",
        "latency of a call: median, ms": lambda _, phase: f"{median(phase.latencies) * 1e3:.0f}",
        "latency of a call: p95, ms": lambda _, phase: f"{_p95(phase.latencies) * 1e3:.0f}",
        "cores in use": lambda _, phase: f"{phase.cpu_seconds / phase.seconds:.2f}",
        "CPU time per call, s": lambda _, phase: f"{phase.cpu_seconds / len(phase.latencies):.2f}",
        "memory of one that waits, MiB": lambda name, _: f"{results.memory_mib.get(name, math.nan):.1f}",
    }
    for row, text in rows.items():
        values = (text(name, phase).replace("nan", "–") for name, phase in phases.items())
        yield f"| {row} | {' | '.join(values)} |"
    yield ""
    steps = ", ".join(f"{step} {seconds * 1e3:.0f}" for step, seconds in results.step_seconds.items())
    yield f"Steps of one sandbox alone, ms: {steps}. A state has {results.state_bytes / MIB:.1f} MiB."
    yield ""
    yield from _computed(results)


def _computed(results: Results) -> Iterator[str]:
    """What the goal would need, by what one suspended sandbox did without pause."""
    alone, idle = results.phases[ALONE], results.phases[KEPT]
    cpu_seconds = alone.cpu_seconds / len(alone.latencies)
    kept_cores = idle.cpu_seconds / idle.seconds / len(idle.calls)
    rate, state_mib = GOAL_EPISODES / GOAL_INTERVAL_SECONDS, results.state_bytes / MIB
    freed_mib = results.memory_mib[KEPT] - results.memory_mib[SUSPENDED]
    rows = {
        "calls per second": f"{rate:.1f}",
        "cores, kept open": f"{GOAL_EPISODES * kept_cores:.1f}",
        "cores, suspended": f"{rate * cpu_seconds:.1f}",
        "memory that suspending frees, GiB": f"{GOAL_EPISODES * freed_mib / 1024:.1f}",
        "states on the disk, GiB": f"{GOAL_EPISODES * state_mib / 1024:.1f}",
        "states written, and as much read, MiB/s": f"{rate * state_mib:.0f}",
        "seconds between calls from which suspending takes less CPU time": f"{cpu_seconds / kept_cores:.0f}",
    }
    goal = f"{GOAL_EPISODES} episodes with a call each {GOAL_INTERVAL_SECONDS:.0f} s"
    yield f"| {goal}, computed from the above | |"
    yield "| --- | ---: |"
    yield from (f"| {name} | {value} |" for name, value in rows.items())


def _p95(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.95)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--image", type=Path, metavar="DIR", required=True)
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--interval", type=float, default=30.0, help="seconds between two calls of a sandbox")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each way is measured")
    options = parser.parse_args()
    values = (options.image, options.episodes, options.interval, options.seconds)
    for line in page(anyio.run(measure, *values)):
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
