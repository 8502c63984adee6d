"""`python -m benchmarks.survival PART`: kill servers and count what is lost."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import anyio

from benchmarks.machine import machine
from benchmarks.survival import report
from benchmarks.survival.cost import measure_cost
from benchmarks.survival.deaths import measure_deaths
from benchmarks.survival.kills import measure_kills
from benchmarks.survival.soak import measure_soak

RESULTS = Path(__file__).parents[1] / "SURVIVAL.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survival", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    kills = parts.add_parser("kills", help="episodes that play while their server is killed")
    kills.add_argument("--provider", choices=("docker", "host"), default="docker")
    kills.add_argument("--episodes", type=int, default=64)
    kills.add_argument("--kills", type=int, default=10)
    kills.add_argument("--every", type=float, default=20, help="seconds between two kills [%(default)s]")
    deaths = parts.add_parser("deaths", help="deaths in every phase of an episode")
    deaths.add_argument("--provider", choices=("docker", "host"), default="docker")
    deaths.add_argument("--count", type=int, default=300, help="number of deaths [%(default)s]")
    deaths.add_argument("--at-once", type=int, default=8, help="episodes at the same time [%(default)s]")
    soak = parts.add_parser("soak", help="thousands of short episodes")
    soak.add_argument("--provider", choices=("fake", "docker", "host"), default="fake")
    soak.add_argument("--episodes", type=int, default=10_000)
    soak.add_argument("--at-once", type=int, default=32, help="episodes at the same time [%(default)s]")
    cost = parts.add_parser("cost", help="a call with and without a store")
    cost.add_argument("--provider", choices=("docker", "host"), default="docker")
    cost.add_argument("--calls", type=int, default=1000, help="rounds of calls [%(default)s]")
    for part in parts.choices.values():
        part.add_argument("--write", action="store_true", help=f"write the result to {RESULTS.name}")
    options = parser.parse_args()
    before = machine()
    text = report.section(options.part, options.provider, before, anyio.run(partial(_run, options)))
    sys.stdout.write(text)
    if options.write:
        report.write_section(RESULTS, text)


async def _run(options: argparse.Namespace) -> str:
    match options.part:
        case "kills":
            return report.kills(
                await measure_kills(
                    options.provider, episodes=options.episodes, kills=options.kills, every=options.every
                )
            )
        case "soak":
            return report.soak(
                await measure_soak(options.provider, episodes=options.episodes, at_once=options.at_once)
            )
        case "cost":
            return report.cost(await measure_cost(options.provider, rounds=options.calls))
        case _:
            return report.deaths(
                await measure_deaths(options.provider, count=options.count, at_once=options.at_once)
            )


if __name__ == "__main__":
    main()
