"""`python -m benchmarks.survival PART`: kill servers and count what is lost."""

from __future__ import annotations

import argparse
import sys
from functools import partial

import anyio

from benchmarks.survival import report
from benchmarks.survival.kills import measure_kills


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survival", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    kills = parts.add_parser("kills", help="episodes that play while their server is killed")
    kills.add_argument("--provider", choices=("docker", "local"), default="docker")
    kills.add_argument("--episodes", type=int, default=64)
    kills.add_argument("--kills", type=int, default=10)
    kills.add_argument("--every", type=float, default=20, help="seconds between two kills [%(default)s]")
    options = parser.parse_args()
    text = anyio.run(partial(_run, options))
    sys.stdout.write(text + "\n")


async def _run(options: argparse.Namespace) -> str:
    measured = await measure_kills(
        options.provider, episodes=options.episodes, kills=options.kills, every=options.every
    )
    return report.kills(measured)


if __name__ == "__main__":
    main()
