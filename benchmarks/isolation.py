"""Opening a local sandbox in namespaces, with and without a network, compared with an ordinary process.

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

from benchmarks.machine import machine
from benchmarks.samples import Measurement, Samples, measure_in_turns
from decathlon_mcp.driver_client.driver import BOOT_COMMAND, connect
from decathlon_mcp.sandboxes.base import Provider, SandboxSpec
from decathlon_mcp.sandboxes.bubblewrap.host_provider import (
    HostProvider,
    why_no_own_network,
    why_unavailable,
)
from decathlon_mcp.sandboxes.bubblewrap.image_folder import ImageFolder
from decathlon_mcp.sandboxes.bubblewrap.provider import BubblewrapProvider
from decathlon_mcp.sandboxes.conformance.archives import file_entry, pack
from decathlon_mcp.sandboxes.docker.provider import DockerProvider
from decathlon_mcp.sandboxes.gvisor.provider import GvisorProvider
from decathlon_mcp.sandboxes.local import LocalProvider
from decathlon_mcp.types import Network

WARM_UP = 3
SIDE_BY_SIDE = 8
"""Sandboxes whose memory is measured together."""
PLAIN, NAMESPACES, NETWORK = "none", "namespaces", "namespaces and a network"


async def measure(rounds: int) -> dict[str, dict[str, Samples]]:
    """Seconds to open, and to open and remove, by isolation."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        owner = f"benchmark-{secrets.token_hex(4)}"
        providers: dict[str, Provider] = {
            PLAIN: await stack.enter_async_context(LocalProvider(owner, folder / PLAIN)),
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
    yield "# Isolation of local sandboxes"
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
            BubblewrapProvider(owner, folder / "bubblewrap"): str(image),
            GvisorProvider(owner, folder / "gvisor"): str(image),
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
        results["memory of one, MiB"] = {}
        for provider, name in available.items():
            async with AsyncExitStack() as opened:
                before = _available_mib()
                for _ in range(SIDE_BY_SIDE):
                    spec = SandboxSpec(f"{owner}-{next(numbers)}", BOOT_COMMAND, PurePosixPath("/e"), name)
                    sandbox = await opened.enter_async_context(provider.open(spec))
                    await opened.enter_async_context(connect(sandbox))
                used = (before - _available_mib()) / SIDE_BY_SIDE
            results["memory of one, MiB"][provider.name] = used
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


def _available_mib() -> float:
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024


def image_page(results: dict[str, dict[str, float]], rounds: int) -> Iterator[str]:
    """The lines of the results' page about sandboxes of an image."""
    names = [*next(iter(results.values()))]
    yield "## Sandboxes of an image"
    yield ""
    yield from (f"- {name}: {value}" for name, value in machine().items())
    yield ""
    yield f"{rounds} sandboxes of each kind, one at a time and in turns; medians. Memory: of {SIDE_BY_SIDE}"
    yield "side by side, each with its driver alone."
    yield ""
    yield f"| step | {' | '.join(names)} |"
    yield f"| --- |{' ---: |' * len(names)}"
    for step, values in results.items():
        yield f"| {step} | {' | '.join(f'{values[name]:.1f}' for name in names)} |"


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
