"""Set-up of a task with four MCP servers, compared with tasks that have one of them each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.openings import open_episode
from benchmarks.running import Server
from benchmarks.samples import Measurement, Samples, measure_in_turns

SINGLE = ("excel", "git", "echo", "plain")
"""Tasks with one server each; task and server have the same name."""
COMBINED = "four"
"""The task with all of these servers."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Time from `initialize` to the reply of `tools/list`, by task."""

    samples: Mapping[str, Samples]

    @property
    def combined(self) -> Samples:
        return self.samples[COMBINED]

    @property
    def slowest(self) -> str:
        """The task that takes longest."""
        return max(SINGLE, key=lambda name: self.samples[name].p50)


async def measure_servers(server: Server, *, rounds: int, warm_up: int) -> Servers:
    """Open one episode at a time, each after the sandbox of the previous one is removed."""

    def opening(task: str) -> Measurement:
        async def measure() -> float:
            seconds = await open_episode(server, task)
            await server.wait_until_empty()
            return seconds

        return measure

    return Servers(
        await measure_in_turns(
            {task: opening(task) for task in (*SINGLE, COMBINED)}, rounds=rounds, warm_up=warm_up
        )
    )
