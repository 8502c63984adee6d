"""Opening a sandbox in namespaces, with and without a network, compared with an ordinary process.

    python -m benchmarks.isolation
    python -m benchmarks.isolation --image DIR    # an unpacked image: bubblewrap, gVisor and Docker compared

A sandbox is open when its network is connected and its driver has answered. Prints a page like
`benchmarks/ISOLATION.md`, or its second part.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path, PurePosixPath
from statistics import median

import anyio

from benchmarks.machine import available_memory_mib, busy_cpu_seconds, machine
from benchmarks.samples import Measurement, Samples, measure_in_turns
from decathlon_mcp.driver.client import BOOT_COMMAND, DriverClient, connect
from decathlon_mcp.errors import DriverError
from decathlon_mcp.plugins.conformance.target import file_entry, pack
from decathlon_mcp.plugins.docker.provider import DockerProvider
from decathlon_mcp.plugins.gvisor.sandbox import GvisorSandbox
from decathlon_mcp.sandboxes.base import Provider, Sandbox, SandboxSpec
from decathlon_mcp.sandboxes.host.image_folder import ImageFolder
from decathlon_mcp.sandboxes.host.isolation import why_no_own_network, why_unavailable
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.types import JsonObject, Network
from tests.fakes.calls import call_server

WARM_UP = 3
SIDE_BY_SIDE = 8
"""Sandboxes whose memory and CPU time are measured together."""
SETTLE_SECONDS, WAITING_SECONDS = 3.0, 10.0
"""Until what was removed, or was started, has come to rest; and how long CPU time is then counted."""
SERVER = """
from mcp.server import MCPServer
server = MCPServer("echo")
@server.tool()
def say(text: str) -> str:
    return text
server.run()
"""
SERVERS = [f"server{number}" for number in range(4)]
GIT = """
set -e
git init -q repository
cd repository
git config user.email a@b
git config user.name a
for i in $(seq 300); do echo $i > file$i; done
git add .
git commit -qm all
git status
"""
SQLITE = """
import sqlite3
base = sqlite3.connect("base", isolation_level=None)
base.execute("create table numbers (n, text)")
for n in range(200):
    base.execute("insert into numbers values (?, ?)", (n, "x" * 100))
base.execute("begin")
base.executemany("insert into numbers values (?, ?)", ((n, str(n)) for n in range(100_000)))
base.execute("commit")
assert base.execute("select count(*) from numbers where text like '%99%'").fetchone()[0]
"""
PROGRAMS: dict[str, list[str]] = {
    "git: add and commit 300 files": ["sh", "-c", GIT],
    "SQLite: 200 transactions, and a query over 100,000 rows": ["python3", "-c", SQLITE],
    "Chromium: print a page": [
        *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--dump-dom", "data:text/html,<p>page</p>"),
    ],
}
"""Programs of an image that has them all, and the MCP SDK 2."""
PROGRAM_ROUNDS = 3
_SERVER_STEPS = ("start four Python servers", "request to one of them")
PLAIN, NAMESPACES, NETWORK = "none", "namespaces", "namespaces and a network"


async def measure(rounds: int) -> dict[str, dict[str, Samples]]:
    """Seconds to open, and to open and remove, by isolation."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        owner = f"benchmark-{secrets.token_hex(4)}"
        providers: dict[str, Provider] = {
            PLAIN: await stack.enter_async_context(HostProvider(owner, folder / PLAIN, isolation="none")),
            NAMESPACES: await stack.enter_async_context(HostProvider(owner, folder / NAMESPACES)),
        }
        providers[NETWORK] = providers[NAMESPACES]
        opened: dict[str, list[float]] = {name: [] for name in providers}
        numbers = itertools.count()
        measurements = {
            name: _opening(provider, owner, numbers, opened[name], "outbound" if name == NETWORK else "none")
            for name, provider in providers.items()
        }
        removed = await measure_in_turns(measurements, rounds=rounds, warm_up=WARM_UP)
    return {
        name: {"open": Samples(tuple(opened[name][WARM_UP:])), "open and remove": removed[name]}
        for name in providers
    }


def _opening(
    provider: Provider, owner: str, numbers: Iterator[int], opened: list[float], network: Network
) -> Measurement:
    async def opening() -> float:
        name = f"{owner}-{next(numbers)}"
        spec = SandboxSpec(name, BOOT_COMMAND, PurePosixPath("/episode"), network=network)
        start = time.perf_counter()
        async with provider.open(spec) as sandbox, connect(sandbox):
            opened.append(time.perf_counter() - start)
        return time.perf_counter() - start

    return opening


def page(results: dict[str, dict[str, Samples]], rounds: int) -> Iterator[str]:
    """The lines of the results' page."""
    yield "# Isolation of sandboxes of this machine"
    yield ""
    yield from (f"- {name}: {value}" for name, value in machine().items())
    yield ""
    yield f"{rounds} sandboxes of each kind, one at a time and in turns; median in milliseconds."
    yield ""
    yield f"| step | `--isolation {PLAIN}` | `--isolation {NAMESPACES}` | ratio | with a network | ratio |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for step in ("open", "open and remove"):
        plain, isolated, network = (results[name][step].p50 * 1e3 for name in (PLAIN, NAMESPACES, NETWORK))
        ratios = (isolated / plain, network / isolated)
        yield f"| {step} | {plain:.1f} | {isolated:.1f} | {ratios[0]:.2f} | {network:.1f} | {ratios[1]:.2f} |"


async def measure_images(image: Path, rounds: int) -> dict[str, dict[str, float]]:
    """What a sandbox of an unpacked image costs, by step and provider: milliseconds, MiB.

    Docker takes part if its engine has the image.
    """
    owner, numbers = f"benchmark-{secrets.token_hex(4)}", itertools.count()
    files = ImageFolder.read(image)
    results: dict[str, dict[str, float]] = {}
    async with AsyncExitStack() as stack:
        # Not in a folder of root's alone: sandboxes run as another user.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        images: dict[Provider, str | None] = {
            DockerProvider(owner): files.digest,
            HostProvider(owner, folder / "image"): str(image),
            HostProvider(owner, folder / "gvisor", kernel=GvisorSandbox): str(image),
        }
        steps: dict[str, dict[str, list[float]]] = {}
        available: dict[Provider, str] = {}
        for provider, name in images.items():
            await stack.enter_async_context(provider)
            if name is not None and all(found.ok for found in await provider.check(name) if found.required):
                available[provider] = name
        for _ in range(WARM_UP + rounds):
            for provider, name in available.items():
                spec = SandboxSpec(f"{owner}-{next(numbers)}", BOOT_COMMAND, PurePosixPath("/episode"), name)
                for step, seconds in (await _steps(provider, spec, folder)).items():
                    steps.setdefault(step, {}).setdefault(provider.name, []).append(seconds * 1e3)
        for step, found in steps.items():
            results[f"{step}, ms"] = {name: median(values[WARM_UP:]) for name, values in found.items()}
        for _ in range(PROGRAM_ROUNDS):
            for provider, name in available.items():
                spec = SandboxSpec(f"{owner}-{next(numbers)}", BOOT_COMMAND, PurePosixPath("/episode"), name)
                for step, seconds in (await _program_steps(provider, spec)).items():
                    steps.setdefault(step, {}).setdefault(provider.name, []).append(seconds * 1e3)
        for step in (*PROGRAMS, *_SERVER_STEPS):
            if step in steps:
                results[f"{step}, ms"] = {name: median(values) for name, values in steps[step].items()}
        for provider, name in available.items():
            specs = (
                SandboxSpec(f"{owner}-{next(numbers)}", BOOT_COMMAND, PurePosixPath("/e"), name)
                for _ in itertools.count()
            )
            for step, value in (await _waiting(provider, specs)).items():
                results.setdefault(step, {})[provider.name] = value
    return results


async def _steps(provider: Provider, spec: SandboxSpec, folder: Path) -> dict[str, float]:
    """Seconds that each step of one sandbox takes."""
    found: dict[str, float] = {}
    archive = pack(file_entry("file", b"x" * 1000))
    start = time.perf_counter()
    async with provider.open(spec) as sandbox, connect(sandbox) as driver:
        opened = time.perf_counter()
        found["open"] = opened - start
        await driver.ping()
        found["message there and back"] = time.perf_counter() - opened
        moment = time.perf_counter()
        await driver.run(["python3", "-c", "pass"], cwd=str(sandbox.root), timeout_seconds=60)
        found["run python3"] = time.perf_counter() - moment
        moment = time.perf_counter()
        await sandbox.put(sandbox.root, archive)
        found["copy a file in"] = time.perf_counter() - moment
        moment = time.perf_counter()
        await sandbox.get(sandbox.root, folder / "out.tar", 1 << 20)
        found["copy it out"] = time.perf_counter() - moment
        moment = time.perf_counter()
    found["remove"] = time.perf_counter() - moment
    return found


async def _waiting(provider: Provider, specs: Iterator[SandboxSpec]) -> dict[str, float]:
    """What one sandbox of SIDE_BY_SIDE takes while nothing is asked of it, without and with a server."""
    found: dict[str, float] = {}
    for kind, servers in (("one", []), ("one with a server on the MCP SDK", SERVERS[:1])):
        await anyio.sleep(SETTLE_SECONDS)
        async with AsyncExitStack() as opened:
            before = available_memory_mib()
            for spec in itertools.islice(specs, SIDE_BY_SIDE):
                sandbox = await opened.enter_async_context(provider.open(spec))
                driver = await opened.enter_async_context(connect(sandbox))
                await _define_servers(driver, sandbox)
                try:
                    await driver.start(servers, deadline_seconds=120)
                except DriverError:
                    return found
            await anyio.sleep(SETTLE_SECONDS)
            found[f"memory of {kind}, MiB"] = (before - available_memory_mib()) / SIDE_BY_SIDE
            cpu_seconds = busy_cpu_seconds()
            await anyio.sleep(WAITING_SECONDS)
            used = (busy_cpu_seconds() - cpu_seconds) / WAITING_SECONDS / SIDE_BY_SIDE
            found[f"CPU time of {kind} that waits, ms/s"] = used * 1e3
    return found


async def _define_servers(driver: DriverClient, sandbox: Sandbox) -> None:
    settings: JsonObject = {
        "command": "python3",
        "args": ["-c", SERVER],
        "env": {},
        "inherit": "all",
        "cwd": str(sandbox.root),
    }
    await driver.define([{"name": name, **settings} for name in SERVERS])


async def _program_steps(provider: Provider, spec: SandboxSpec) -> dict[str, float]:
    """Seconds that programs of the image and four servers take; nothing for what the image does not have."""
    found: dict[str, float] = {}
    async with provider.open(spec) as sandbox, connect(sandbox) as driver:
        root = str(sandbox.root)
        for step, command in PROGRAMS.items():
            moment = time.perf_counter()
            try:
                result = await driver.run(command, cwd=root, timeout_seconds=120)
            except DriverError:
                continue
            if result.exit_code == 0:
                found[step] = time.perf_counter() - moment
        await _define_servers(driver, sandbox)
        moment = time.perf_counter()
        try:
            await driver.start(SERVERS, deadline_seconds=120)
        except DriverError:
            return found
        found[_SERVER_STEPS[0]] = time.perf_counter() - moment
        seconds: list[float] = []
        for number in range(40):
            moment = time.perf_counter()
            call = {"name": "say", "arguments": {"text": "again"}}
            await call_server(driver, SERVERS[number % len(SERVERS)], call)
            seconds.append(time.perf_counter() - moment)
        found[_SERVER_STEPS[1]] = median(seconds)
    return found


def image_page(results: dict[str, dict[str, float]], rounds: int) -> Iterator[str]:
    """The lines of the results' page about sandboxes of an image."""
    names = [*next(iter(results.values()))]
    yield "## Sandboxes of an image"
    yield ""
    yield from (f"- {name}: {value}" for name, value in machine().items())
    yield ""
    yield f"{rounds} sandboxes of each kind, {PROGRAM_ROUNDS} for programs and servers, in turns; medians."
    yield f"Memory and CPU time of the machine, {SIDE_BY_SIDE} sandboxes side by side: only on an idle one."
    yield ""
    yield f"| step | {' | '.join(names)} |"
    yield f"| --- |{' ---: |' * len(names)}"
    for step, values in results.items():
        figures = (f"{values[name]:.1f}" if name in values else "–" for name in names)
        yield f"| {step} | {' | '.join(figures)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--image", type=Path, metavar="DIR")
    options = parser.parse_args()
    rounds = options.rounds
    if options.image is not None:
        for line in image_page(anyio.run(measure_images, options.image, rounds), rounds):
            sys.stdout.write(f"{line}\n")
        return 0
    if (reason := why_unavailable() or why_no_own_network()) is not None:
        sys.stderr.write(f"{reason}\n")
        return 1
    for line in page(anyio.run(measure, rounds), rounds):
        sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
