"""A tool call through the server and a sandbox, compared with its two legs and with a process per call."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import mcp_types as types
from decathlon_client import Decathlon
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from benchmarks.floors import AttachedServer, attached, docker_exec
from benchmarks.running import Server, tool_server
from benchmarks.samples import Measurement, Samples, measure_in_turns, timed

Era = Literal["handshake", "sessionless"]
Endpoint = Literal["task address", "episode address", "direct, JSON", "direct, events", "stream"]
"""An address of the server; the tool server itself, by response format; a container's attached stream."""

TEXT = "x" * 100
SERVER_PATHS: tuple[tuple[Endpoint, Era], ...] = (
    ("task address", "handshake"),
    ("episode address", "handshake"),
    ("episode address", "sessionless"),
)
DIRECT_ENDPOINTS: tuple[Endpoint, ...] = ("direct, JSON", "direct, events")
ERAS: tuple[Era, ...] = ("handshake", "sessionless")
DIRECT: list[tuple[Endpoint, Era]] = [(endpoint, era) for endpoint in DIRECT_ENDPOINTS for era in ERAS]
STREAM: tuple[Endpoint, Era] = ("stream", "handshake")


@dataclass(frozen=True, slots=True)
class Calls:
    samples: dict[tuple[Endpoint, Era], Samples]

    def legs(self, direct: Endpoint, era: Era) -> Samples:
        """Return the sum of a direct call to the tool server and a call over the attached stream."""
        return self.samples[direct, era] + self.samples[STREAM]


async def measure_calls(server: Server, image: str, *, rounds: int, warm_up: int) -> Calls:
    """Measure all paths and legs in turns; each has its own SDK client in this process."""
    async with (
        attached(image) as stream_server,
        tool_server("json") as json_server,
        tool_server("events") as event_server,
        Decathlon(server.url) as d,
        d.episode("echo") as episode,
        AsyncExitStack() as clients,
    ):
        urls: dict[Endpoint, str] = {
            "task address": server.task("echo"),
            "episode address": server.episode(episode.id),
            "direct, JSON": json_server.url,
            "direct, events": event_server.url,
        }
        measurements: dict[tuple[Endpoint, Era], Measurement] = {STREAM: _over_stream(stream_server)}
        for endpoint, era in (*SERVER_PATHS, *DIRECT):
            client = await clients.enter_async_context(connected(urls[endpoint], era))
            measurements[endpoint, era] = _over_http(
                client, "echo__echo" if (endpoint, era) in SERVER_PATHS else "echo"
            )
        return Calls(await measure_in_turns(measurements, rounds=rounds, warm_up=warm_up))


@dataclass(frozen=True, slots=True)
class Processes:
    """A call through the server, and `docker exec` of a Python that imports the SDK."""

    call: Samples
    process: Samples


async def measure_processes(server: Server, image: str, *, rounds: int, warm_up: int) -> Processes:
    async with attached(image) as stream_server, connected(server.task("echo"), "handshake") as client:
        measurements = {
            "process": timed(lambda: docker_exec(stream_server.container)),
            "call": _over_http(client, "echo__echo"),
        }
        samples = await measure_in_turns(measurements, rounds=rounds, warm_up=warm_up)
    return Processes(samples["call"], samples["process"])


@asynccontextmanager
async def connected(url: str, era: Era) -> AsyncGenerator[Client]:
    """Connect an SDK client and list the tools."""
    mode = "legacy" if era == "handshake" else "auto"
    async with Client(streamable_http_client(url), mode=mode) as client:
        await client.list_tools()
        yield client


def _over_http(client: Client, tool: str) -> Measurement:
    async def call() -> None:
        result = await client.call_tool(tool, {"text": TEXT})
        assert result.content == [types.TextContent(type="text", text=TEXT)]

    return timed(call)


def _over_stream(server: AttachedServer) -> Measurement:
    async def call() -> None:
        result: dict[str, Any] = await server.request(
            "tools/call", {"name": "echo", "arguments": {"text": TEXT}}
        )
        assert result["content"] == [{"type": "text", "text": TEXT}]

    return timed(call)
