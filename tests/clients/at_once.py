"""Measures many episodes at once, each in a container of the tests' image.

    python -m tests.clients.at_once 64 128 256

A player waits until all have an episode, so that all are open at the same time; then it calls three tools and
claims. Prints the times, and the containers that are left according to the engine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import docker
import httpx2
from decathlon_client import Decathlon, Episode

from decathlon_mcp.plugins.docker.image import STARTER_IMAGE
from tests.probe.serving import SUITE

UP_SECONDS = 60.0


class Together:
    """Holds players back until `size` of them have an episode; records when that was and how many play."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._all_there = anyio.Event()
        self.playing = 0
        self.most = 0
        self.since = 0.0

    async def player(self, e: Episode) -> None:
        self.playing += 1
        self.most = max(self.most, self.playing)
        if self.playing == self._size:
            self.since = time.monotonic()
            self._all_there.set()
        await self._all_there.wait()
        assert (await e.call("probe__read", {"path": "question.txt"})).text == "six times seven\n"
        assert (await e.call("probe__echo", {"text": e.id})).text == e.id
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        await e.claim_done()
        self.playing -= 1


async def measure(size: int) -> None:
    together, started = Together(size), time.monotonic()
    async with serving(size) as (url, owner, process):
        async with Decathlon(url) as d, d.batch(["find-answer"] * size, concurrency=size) as batch:
            failures = [result.failure async for result in batch.run(together.player) if result.failure]
            done, tally = time.monotonic(), batch.tally
        await _empty(url)
        left = _containers(owner)
        cpu_seconds = _cpu_seconds(process)
    sys.stdout.write(
        f"{size} episodes: {together.most} playing at once after {together.since - started:.0f} s, "
        f"{tally.scored} graded after {done - started:.0f} s, mean reward {tally.mean_reward}, "
        f"{tally.lost} lost, {tally.broken} broken, {left} containers left; "
        f"the server took {cpu_seconds:.0f} s of CPU\n"
    )
    for failure in failures[:3]:
        sys.stdout.write(f"  {type(failure).__name__}: {failure}\n")
    sys.stdout.flush()


@asynccontextmanager
async def serving(size: int) -> AsyncGenerator[tuple[str, str, int]]:
    """A server in a separate process: its URL, its containers' owner label, its process id."""
    with tempfile.TemporaryDirectory(prefix="decathlon-at-once-") as name:
        state = Path(name)
        options = {
            "--suite": SUITE,
            "--provider": "docker",
            "--image": STARTER_IMAGE,
            "--port": 0,
            "--state": state,
            "--ready-file": state / "ready",
            "--max-sandboxes": size,
            "--max-opening": max(4, 2 * (os.cpu_count() or 2)),
            "--log-level": "error",
        }
        flags = [str(part) for option in options.items() for part in option]
        command = [sys.executable, "-m", "decathlon_mcp.cli", "serve", "--no-supervisor", *flags]
        async with await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=None) as process:
            try:
                with anyio.fail_after(UP_SECONDS):
                    while not (state / "ready").exists():  # noqa: ASYNC110  (a file of another process)
                        await anyio.sleep(0.05)
                (owner,) = (file.name for file in (state / "servers").iterdir())
                yield (state / "ready").read_text().strip(), owner, process.pid
            finally:
                process.terminate()


async def _empty(url: str) -> None:
    """Wait until the server has no sandbox in use, at most UP_SECONDS."""
    with anyio.move_on_after(UP_SECONDS):
        async with httpx2.AsyncClient() as client:
            while (await client.get(f"{url}/healthz")).json()["sandboxes"]:  # noqa: ASYNC110
                await anyio.sleep(0.1)


def _containers(owner: str) -> int:
    api: Any = docker.APIClient()
    try:
        return len(api.containers(all=True, filters={"label": f"decathlon.owner={owner}"}))
    finally:
        api.close()


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.at_once", description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=[64, 128, 256])
    for size in parser.parse_args().sizes:
        anyio.run(measure, size)


if __name__ == "__main__":
    main()
