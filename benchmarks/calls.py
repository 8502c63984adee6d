"""A tool call through the server and a sandbox, against its two legs; and against a process for each call."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import mcp_types as types
from decathlon_client import Decathlon
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from benchmarks.floors import Attached, attached, docker_exec
from benchmarks.running import Server, tool_server
from benchmarks.samples import EpisodeResolver, Samples, in_turns, timed

Era = Literal["handshake", "sessionless"]
Where = Literal["task address", "episode address", "direct, JSON", "direct, as the SDK does", "stream"]
"""Through the server by one of its addresses; to the tool server itself; over the attached stream."""

TEXT = "x" * 100
WAYS: tuple[tuple[Where, Era], ...] = (
    ("task address", "handshake"),
    ("episode address", "handshake"),
    ("episode address", "sessionless"),
)
FLOORS: tuple[Where, ...] = ("direct, JSON", "direct, as the SDK does")
ERAS: tuple[Era, ...] = ("handshake", "sessionless")
DIRECT: list[tuple[Where, Era]] = [(where, era) for where in FLOORS for era in ERAS]
STREAM: tuple[Where, Era] = ("stream", "handshake")


@dataclass(frozen=True, slots=True)
class Calls:
    taken: dict[tuple[Where, Era], Samples]

    def legs(self, direct: Where, era: Era) -> Samples:
        """The sum of the two: the tool server called directly, and over the bare stream."""
        return self.taken[direct, era] + self.taken[STREAM]


async def measure_calls(server: Server, image: str, *, rounds: int, warm_up: int) -> Calls:
    """Every way and every leg in turns; one SDK client each, all in this process."""
    async with (
        attached(image) as bare,
        tool_server("json") as quick,
        tool_server("events") as plain,
        Decathlon(server.url) as d,
        d.episode("echo") as episode,
        AsyncExitStack() as clients,
    ):
        urls: dict[Where, str] = {
            "task address": server.task("echo"),
            "episode address": server.episode(episode.id),
            "direct, JSON": quick.url,
            "direct, as the SDK does": plain.url,
        }
        ways: dict[tuple[Where, Era], EpisodeResolver] = {STREAM: _over_stream(bare)}
        for where, era in (*WAYS, *DIRECT):
            client = await clients.enter_async_context(connected(urls[where], era))
            ways[where, era] = _over_http(client, "echo__echo" if (where, era) in WAYS else "echo")
        return Calls(await in_turns(ways, rounds=rounds, warm_up=warm_up))


@dataclass(frozen=True, slots=True)
class Processes:
    """A call through the server, and `docker exec` of a Python that imports the SDK."""

    call: Samples
    process: Samples


async def measure_processes(server: Server, image: str, *, rounds: int, warm_up: int) -> Processes:
    async with attached(image) as bare, connected(server.task("echo"), "handshake") as client:
        ways = {
            "process": timed(lambda: docker_exec(bare.container)),
            "call": _over_http(client, "echo__echo"),
        }
        taken = await in_turns(ways, rounds=rounds, warm_up=warm_up)
    return Processes(taken["call"], taken["process"])


@asynccontextmanager
async def connected(url: str, era: Era) -> AsyncGenerator[Client]:
    """An SDK client that has seen the tools."""
    mode = "legacy" if era == "handshake" else "auto"
    async with Client(streamable_http_client(url), mode=mode) as client:
        await client.list_tools()
        yield client


def _over_http(client: Client, tool: str) -> EpisodeResolver:
    async def call() -> None:
        result = await client.call_tool(tool, {"text": TEXT})
        assert result.content == [types.TextContent(type="text", text=TEXT)]

    return timed(call)


def _over_stream(bare: Attached) -> EpisodeResolver:
    async def call() -> None:
        result: dict[str, Any] = await bare.ask("tools/call", {"name": "echo", "arguments": {"text": TEXT}})
        assert result["content"] == [{"type": "text", "text": TEXT}]

    return timed(call)
