"""What survival costs a call: servers with and without a store, in turns."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from decathlon_client import Decathlon

from benchmarks.samples import Measurement, Samples, measure_in_turns, timed
from benchmarks.survival.running import ProviderName, killable_server
from benchmarks.wire_client import wire_client

Path = Literal[
    "episode address, decathlon_client", "task address, bare HTTP", "task address, bare HTTP, 2025-06-18"
]
PATHS: tuple[Path, ...] = get_args(Path)
OLDER_PROTOCOL = "2025-06-18"
"""Replies of this revision are JSON, with a store too. Those of the next are then events that can be resumed,
so that the difference is not the store's alone."""
TEXT = "x" * 100


@dataclass(frozen=True, slots=True)
class Cost:
    """Durations of calls by path and by whether sandboxes survive their server."""

    samples: dict[tuple[Path, bool], Samples]

    def ratio(self, path: Path) -> float:
        """p50 of a call with a store, in units of that without one."""
        return self.samples[path, True].p50 / self.samples[path, False].p50


async def measure_cost(provider: ProviderName, *, rounds: int) -> Cost:
    async with AsyncExitStack() as stack:
        measurements: dict[tuple[Path, bool], Measurement] = {}
        for survives in (True, False):
            options = () if survives else ("--survive-seconds", "0")
            server = await stack.enter_async_context(killable_server(provider, *options))
            calls = await stack.enter_async_context(_calls(server.url))
            measurements |= {(path, survives): calls[path] for path in PATHS}
        return Cost(await measure_in_turns(measurements, rounds=rounds, warm_up=rounds // 10))


@asynccontextmanager
async def _calls(url: str) -> AsyncGenerator[dict[Path, Measurement]]:
    async with (
        Decathlon(url) as client,
        client.episode("find-answer") as episode,
        wire_client(f"{url}/tasks/find-answer/mcp") as session,
        wire_client(f"{url}/tasks/find-answer/mcp", protocol=OLDER_PROTOCOL) as older,
    ):
        await session.request("tools/list", {})
        await older.request("tools/list", {})
        params = {"name": "probe__echo", "arguments": {"text": TEXT}}
        yield {
            "episode address, decathlon_client": timed(lambda: episode.call("probe__echo", {"text": TEXT})),
            "task address, bare HTTP": timed(lambda: session.request("tools/call", params)),
            "task address, bare HTTP, 2025-06-18": timed(lambda: older.request("tools/call", params)),
        }
        await session.end()
        await older.end()
