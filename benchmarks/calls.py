"""One tool call through the server and a sandbox, compared with its two legs and with a process per call."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal

import mcp_types as types
from decathlon_client import Decathlon
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from benchmarks.figures import Figures, Target
from benchmarks.floors import AttachedServer, attached, docker_exec
from benchmarks.load import TEXT
from benchmarks.running import Run, decathlon, tool_server
from benchmarks.samples import Measurement, Samples, measure_in_turns, timed
from benchmarks.spans import measure_spans

Era = Literal["handshake", "sessionless"]
Endpoint = Literal["task address", "episode address", "direct, JSON", "direct, events", "stream"]
"""An address of the server; the tool server itself, by response format; a container's attached stream."""

SERVER_PATHS: tuple[tuple[Endpoint, Era], ...] = (
    ("task address", "handshake"),
    ("episode address", "handshake"),
    ("episode address", "sessionless"),
)
DIRECT: tuple[tuple[Endpoint, Era], ...] = (
    ("direct, JSON", "handshake"),
    ("direct, JSON", "sessionless"),
    ("direct, events", "handshake"),
    ("direct, events", "sessionless"),
)
STREAM: tuple[Endpoint, Era] = ("stream", "handshake")
LEGS_TARGET = Target("at most", 1.0)


async def measure_calls(run: Run, figures: Figures) -> None:
    """Calls take turns with their legs. Each path has its own SDK client; all clients run in this process."""
    rounds = run.options.rounds
    async with (
        attached(run, 1) as (stream_server,),
        tool_server(run, "json") as json_server,
        tool_server(run, "events") as event_server,
        decathlon(run) as server,
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
            name = "echo__echo" if (endpoint, era) in SERVER_PATHS else "echo"
            measurements[endpoint, era] = over_http(client, name)
        for _ in range(run.options.repeats):
            samples = await measure_in_turns(measurements, rounds=rounds, warm_up=max(1, rounds // 10))
            _add_calls(figures, samples)
        await _measure_processes(run, figures, stream_server, measurements["task address", "handshake"])
    for _ in range(run.options.repeats):
        with_spans, without = await measure_spans(run)
        figures.add(
            "server CPU per call with `--spans`", "µs", with_spans * 1e6, floor=("without", without * 1e6)
        )


def _add_calls(figures: Figures, samples: dict[tuple[Endpoint, Era], Samples]) -> None:
    for endpoint, era in SERVER_PATHS:
        for direct in ("direct, JSON", "direct, events"):
            call, legs = samples[endpoint, era], samples[direct, era] + samples[STREAM]
            floor = f"{direct} + stream"
            name = f"{endpoint}, {era}"
            # The target is for the SDK's fastest format.
            target = LEGS_TARGET if direct == "direct, JSON" else None
            suffix = "" if direct == "direct, JSON" else ", against events"
            figures.add(
                f"{name}{suffix}: p50", "ms", call.p50 * 1e3, floor=(floor, legs.p50 * 1e3), target=target
            )
            figures.add(f"{name}{suffix}: p99", "ms", call.p99 * 1e3, floor=(floor, legs.p99 * 1e3))
    for endpoint, era in (*DIRECT, STREAM):
        name = "attached stream" if endpoint == "stream" else f"{endpoint}, {era}"
        figures.add(f"leg: {name}: p50", "ms", samples[endpoint, era].p50 * 1e3)


async def _measure_processes(
    run: Run, figures: Figures, stream_server: AttachedServer, call: Measurement
) -> None:
    measurements = {"process": timed(lambda: docker_exec(stream_server.container)), "call": call}
    for _ in range(run.options.repeats):
        samples = await measure_in_turns(measurements, rounds=max(1, run.options.openings // 2), warm_up=0)
        figures.add(
            "a call, in turns with a process per call: p50",
            "ms",
            samples["call"].p50 * 1e3,
            floor=("`docker exec python3 -c 'import mcp'`", samples["process"].p50 * 1e3),
        )


@asynccontextmanager
async def connected(url: str, era: Era) -> AsyncGenerator[Client]:
    """Connect an SDK client and list the tools."""
    mode = "legacy" if era == "handshake" else "auto"
    async with Client(streamable_http_client(url), mode=mode) as client:
        await client.list_tools()
        yield client


def over_http(client: Client, tool: str) -> Measurement:
    async def call() -> None:
        result = await client.call_tool(tool, {"text": TEXT})
        assert result.content == [types.TextContent(type="text", text=TEXT)]

    return timed(call)


def _over_stream(server: AttachedServer) -> Measurement:
    async def call() -> None:
        result = server.request("tools/call", {"name": "echo", "arguments": {"text": TEXT}})
        assert result["content"] == [{"type": "text", "text": TEXT}]

    return timed(call)
