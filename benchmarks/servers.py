"""Setting up a task with four servers, against tasks with one of them each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.openings import open_episode
from benchmarks.running import Server
from benchmarks.samples import EpisodeResolver, Samples, in_turns

ALONE = ("excel", "git", "echo", "plain")
"""Tasks with one server, of the same name."""
TOGETHER = "four"
"""The task with all of them."""


@dataclass(frozen=True, slots=True)
class Servers:
    """From `initialize` to the answered `tools/list`, by task."""

    taken: Mapping[str, Samples]

    @property
    def together(self) -> Samples:
        return self.taken[TOGETHER]

    @property
    def slowest(self) -> str:
        """The server that alone takes longest."""
        return max(ALONE, key=lambda name: self.taken[name].p50)


async def measure_servers(server: Server, *, rounds: int, warm_up: int) -> Servers:
    """One at a time; the next begins when nothing is left of the last."""

    def way(task: str) -> EpisodeResolver:
        async def once() -> float:
            taken = await open_episode(server, task)
            await server.empty()
            return taken

        return once

    return Servers(
        await in_turns({task: way(task) for task in (*ALONE, TOGETHER)}, rounds=rounds, warm_up=warm_up)
    )
