"""Opening a local sandbox in namespaces, with and without a network, compared with an ordinary process.

    python -m benchmarks.isolation

A sandbox is open when its network is connected and its driver has answered. Prints a page like
`benchmarks/ISOLATION.md`.
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
from decathlon_mcp.sandboxes.local import LocalProvider
from decathlon_mcp.types import Network

WARM_UP = 3
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    if (reason := why_unavailable() or why_no_own_network()) is not None:
        sys.stderr.write(f"{reason}\n")
        return 1
    for line in page(anyio.run(measure, rounds), rounds):
        sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
