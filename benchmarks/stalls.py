"""How long replies of 4 MiB delay the calls of other episodes.

python -m benchmarks.stalls URL COUNT   (used by this module: the client that gets the long replies)
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import anyio
from anyio.abc import Process

from benchmarks import attacks
from benchmarks.figures import Figures, Target
from benchmarks.floors import attached
from benchmarks.load import Session, echo
from benchmarks.running import Run, decathlon
from benchmarks.samples import Samples
from benchmarks.wire_client import wire_client

REPLY_BYTES = (4 << 20) - (1 << 16)
"""Close to the longest reply that is passed on."""
REPLIES = 5
TARGET = Target("at most", 20.0)


@dataclass(frozen=True, slots=True)
class _Delays:
    longest_seconds: float
    median_seconds: float
    total_seconds: float


async def measure_stalls(run: Run, figures: Figures) -> None:
    """The longest call of an episode while another one gets long replies, and without them.

    Also of a container that has nothing to do with the server: what the machine's processors cost it.
    """
    async with (
        decathlon(run) as server,
        wire_client(server.task("plain")) as neighbour,
        attached(run, 1, "plain") as (container,),
        container.concurrent() as bare,
        _long_replies(run, server.task("hostile")) as get_long_replies,
    ):
        # Its server may start with the first call.
        await echo(neighbour, "plain__echo")
        for _ in range(run.options.repeats):
            during = await _call_during(neighbour, "plain__echo", get_long_replies)
            pause = partial(anyio.sleep, during.total_seconds)
            without = await _call_during(neighbour, "plain__echo", pause)
            bare_during = await _call_during(bare, "echo", get_long_replies)
            bare_without = await _call_during(bare, "echo", pause)
            for name, delays, usual, target in (
                ("longest delay of another episode's call by replies of 4 MiB", during, without, TARGET),
                ("longest delay without such replies", without, without, None),
                ("longest delay of a bare attached stream by them", bare_during, bare_without, None),
                ("longest delay of it without them", bare_without, bare_without, None),
            ):
                delay_seconds = delays.longest_seconds - usual.median_seconds
                figures.add(name, "ms", delay_seconds * 1e3, target=target)
        await neighbour.end()


async def _call_during(session: Session, tool: str, operation: Callable[[], Awaitable[object]]) -> _Delays:
    """Call without pause while an operation runs."""
    seconds: list[float] = []
    over = False

    async def call() -> None:
        while not over:
            sent = time.perf_counter()
            await echo(session, tool)
            seconds.append(time.perf_counter() - sent)

    start = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await operation()
        over = True
    return _Delays(max(seconds), Samples(tuple(seconds)).p50, time.perf_counter() - start)


@asynccontextmanager
async def _long_replies(run: Run, url: str) -> AsyncGenerator[Callable[[], Awaitable[None]]]:
    """A session that gets long replies, in another process: reading them would delay the other client."""
    command = [sys.executable, "-m", "benchmarks.stalls", url, str(REPLIES)]
    async with await anyio.open_process(command, stdout=subprocess.PIPE, stderr=None) as process:
        try:

            async def get() -> None:
                assert process.stdin is not None
                await process.stdin.send(b"\n")
                await _wait_until_done(process)

            await _wait_until_done(process)
            yield get
        finally:
            if process.returncode is None:
                process.terminate()


async def _wait_until_done(process: Process) -> None:
    assert process.stdout is not None
    try:
        await process.stdout.receive()
    except anyio.EndOfStream:
        raise RuntimeError("the client of the long replies has failed") from None


def main(url: str, count: int) -> None:
    """Get one long reply, then `count` of them for each line of stdin. Writes a line when it has them."""
    parts = urlsplit(url)
    session = attacks.Session((str(parts.hostname), int(parts.port or 80)), parts.path)
    session.request("tools/list", {})
    arguments = {"pattern": "text", "size_bytes": REPLY_BYTES}
    session.call("hostile__reply", arguments)
    sys.stdout.write("\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        for _ in range(count):
            session.call("hostile__reply", arguments)
        sys.stdout.write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
