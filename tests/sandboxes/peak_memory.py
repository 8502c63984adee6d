"""Program for tests: opens and removes a sandbox, sweeps, and prints by how many MiB its memory has grown."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import anyio

from decathlon_mcp.hooks import providers
from decathlon_mcp.sandboxes.plugins import load_provider
from tests.sandboxes.conftest import plain_bench


async def main(folder: Path) -> None:
    bench = plain_bench("test-peak", folder)
    async with bench.provider:
        async with bench.provider.open(bench.spec()):
            before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await bench.provider.sweep(bench.owner)
        for plugin in map(load_provider, providers()):
            if plugin.inventory is not None and not plugin.is_remote:
                async with plugin.inventory(folder) as inventory:
                    await inventory.sandboxes(bench.owner)
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(f"{(after_kib - before_kib) >> 10}\n")


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
