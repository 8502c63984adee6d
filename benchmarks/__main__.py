"""`python -m benchmarks [--write]`: run the benchmarks and print each result as it is ready."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio

from benchmarks import report
from benchmarks.batch import measure_batch
from benchmarks.calls import measure_calls, measure_processes
from benchmarks.machine import machine
from benchmarks.metering import measure_metering
from benchmarks.openings import measure_openings
from benchmarks.running import Server, decathlon
from benchmarks.servers import measure_servers

PARTS = ("calls", "metering", "processes", "openings", "servers", "batch")
RESULTS = Path(__file__).parent / "RESULTS.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write the results to {RESULTS.name}")
    parser.add_argument(
        "--image", default="decathlon-test:latest", help="image with Python and the MCP SDK [%(default)s]"
    )
    parser.add_argument("--calls", type=int, default=1000, help="rounds of calls [%(default)s]")
    parser.add_argument("--openings", type=int, default=40, help="rounds of openings [%(default)s]")
    parser.add_argument("--set-ups", type=int, default=10, help="rounds of set-ups [%(default)s]")
    parser.add_argument("--processes", type=int, default=15, help="rounds of processes [%(default)s]")
    parser.add_argument("--batch", type=int, default=64, help="number of concurrent episodes [%(default)s]")
    parser.add_argument(
        "--load-seconds", type=float, default=10, help="duration of the load test [%(default)s]"
    )
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="run only these parts [all]")
    anyio.run(_run, parser.parse_args())


async def _run(options: argparse.Namespace) -> None:
    parts: list[str] = []
    async for part in _results(options):
        sys.stdout.write(part + "\n\n")
        sys.stdout.flush()
        parts.append(part)
    if options.write:
        RESULTS.write_text("\n\n".join(parts) + "\n")


async def _results(options: argparse.Namespace) -> AsyncGenerator[str]:
    image: str = options.image
    yield report.head(machine())
    async with decathlon(image, sandboxes=options.batch) as server:
        for part in options.only:
            yield await _run_part(part, server, options)


async def _run_part(part: str, server: Server, options: argparse.Namespace) -> str:
    image: str = options.image
    match part:
        case "calls":
            warm_up: int = options.calls // 10
            return report.calls(await measure_calls(server, image, rounds=options.calls, warm_up=warm_up))
        case "metering":
            return report.metering(await measure_metering(rounds=100, warm_up=10))
        case "processes":
            return report.processes(
                await measure_processes(server, image, rounds=options.processes, warm_up=2)
            )
        case "openings":
            return report.openings(await measure_openings(server, image, rounds=options.openings, warm_up=3))
        case "servers":
            return report.servers(await measure_servers(server, rounds=options.set_ups, warm_up=1))
        case _:
            return report.batch(
                await measure_batch(server, size=options.batch, load_seconds=options.load_seconds)
            )


if __name__ == "__main__":
    main()
