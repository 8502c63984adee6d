"""Plays a batch that never ends, until Ctrl-C; exits as a shell command does."""

from __future__ import annotations

import asyncio
import sys

from decathlon_client import Decathlon, Episode

EPISODES = 4


async def main(url: str) -> None:
    playing = 0

    async def player(e: Episode) -> None:
        nonlocal playing
        playing += 1
        if playing == EPISODES:
            sys.stdout.write("playing\n")
            sys.stdout.flush()
        await e.call("probe__sleep", {"seconds": 100, "note": "late"})

    async with Decathlon(url) as d:
        async with d.batch(["find-answer"] * 10, concurrency=EPISODES, progress=False) as batch:
            async for result in batch.run(player):
                raise AssertionError(result)


try:
    asyncio.run(main(sys.argv[1]))
except KeyboardInterrupt:
    sys.exit(130)
