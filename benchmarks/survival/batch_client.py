"""A client program that plays batches until it is killed; see `deaths`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import anyio
from decathlon_client import Decathlon, Episode

from benchmarks.survival.running import ANSWER


async def main(url: str, tasks: list[str], concurrency: int) -> None:
    def endless() -> Iterator[str]:
        return itertools.cycle(tasks)

    async def play(episode: Episode) -> None:
        await episode.call("probe__shell", {"command": "sleep 0.5"})
        await episode.call("probe__write", {"path": "answer.txt", "text": ANSWER})

    async with Decathlon(url) as client, client.batch(endless(), concurrency=concurrency) as batch:
        async for _ in batch.run(play):
            pass


if __name__ == "__main__":
    _, address, names, at_once = sys.argv
    anyio.run(main, address, names.split(","), int(at_once))
