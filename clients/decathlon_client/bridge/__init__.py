"""The bridge, `decathlon-mcp stdio --url URL`: relays stdin and stdout to a server over streamable HTTP.

The SDK's two transports do the work; messages pass between them unchanged, except that each `tools/call`
without an operation id gets one. `relay` adds the HTTP headers that an SDK session would add. `http` sends a
request again whose connection was lost, opens a forgotten lobby session again, and answers for a server that
does not.

Requires `mcp` 2.3 or later and nothing of the server: it runs on any system, without sandboxes.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import quote, urlsplit

import anyio
from mcp.client.streamable_http import streamable_http_client
from mcp.server.stdio import stdio_server

from decathlon_client.background import background_tasks
from decathlon_client.bridge.http import BridgeHttpClient, log
from decathlon_client.bridge.relay import Relay
from decathlon_client.process import StdinPump, stop_on_signal
from decathlon_client.values import parse_labels, server_token, server_url


async def bridge(url: str | None, task: str | None, labels: Mapping[str, str] | None = None) -> int:
    """Relay until stdin ends or SIGTERM or SIGINT arrives, then end the session with a DELETE.

    `url` is a server's root or the address of a lobby, task or episode; the token is in `DECATHLON_TOKEN`.
    `labels`: labels of each episode that starts. Returns the exit status.
    """
    try:
        endpoint, token = address(url, task), server_token(None)
    except ValueError as error:
        log(str(error))
        return 1
    log(f"relaying stdin and stdout to {endpoint}")
    source, sink = socket.socketpair()
    with source, sink, source.makefile("r", encoding="utf-8", errors="replace") as stdin:
        async with stdio_server(anyio.wrap_file(stdin)) as (from_client, to_client), from_client, to_client:
            # The pump ends before stdio_server does, whose reader would otherwise block in its thread.
            loop, stdin_ended = asyncio.get_running_loop(), anyio.Event()
            with StdinPump(0, sink, lambda: loop.call_soon_threadsafe(stdin_ended.set)) as pump:
                async with (
                    BridgeHttpClient(endpoint, token, labels or {}) as http,
                    # The default, 1 MiB for an event, would refuse large replies.
                    streamable_http_client(endpoint, http_client=http, max_sse_event_size=None) as server,
                    background_tasks() as tasks,
                ):
                    relay = Relay((from_client, to_client), server, http.notify, stdin_ended)

                    async def end_on_signal() -> None:
                        if await stop_on_signal(pump):
                            # Also while something waits for the server.
                            tasks.cancel_scope.cancel()

                    tasks.start_soon(end_on_signal)
                    tasks.start_soon(relay.run_to_client)
                    await relay.run_to_server()
    return 0


def main(arguments: Sequence[str]) -> int:
    """`decathlon-mcp stdio` where only the client is installed. Returns the exit status."""
    parser = argparse.ArgumentParser("decathlon-mcp stdio")
    parser.add_argument("--url")
    parser.add_argument("--task")
    parser.add_argument("--label", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(arguments)
    try:
        labels = parse_labels(options.label)
    except ValueError as error:
        parser.error(str(error))
    return anyio.run(bridge, options.url, options.task, labels)


def address(url: str | None, task: str | None = None) -> str:
    """The MCP address for a server's URL: its lobby or, with a task, that task's; other addresses unchanged.

    None: see `server_url`. Raises ValueError if it is not an HTTP URL.
    """
    url = server_url(url)
    if urlsplit(url).path.startswith(("/tasks/", "/episodes/")) and task is None:
        return url
    root = url.rstrip("/").removesuffix("/mcp")
    return f"{root}/mcp" if task is None else f"{root}/tasks/{quote(task, safe='')}/mcp"
