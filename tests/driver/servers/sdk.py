"""A server on the MCP SDK: `sdk.py stdio | http | json | sse TOKEN`. Over HTTP it prints its URL."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import TYPE_CHECKING

import anyio
from mcp.server.mcpserver import Context, MCPServer

if TYPE_CHECKING:
    from starlette.applications import Starlette

mcp = MCPServer("sdk")


@mcp.tool()
def echo(words: str) -> str:
    return words


@mcp.tool()
async def count(to: int, ctx: Context) -> str:
    for number in range(1, to + 1):
        await ctx.report_progress(number, to, f"step {number}")
    return f"counted to {to}"


@mcp.tool()
async def sleep(seconds: float) -> str:
    await anyio.sleep(seconds)
    return "done"


@mcp.tool()
async def hang(note: str, ctx: Context) -> str:
    """Never return; write a file at `note` when cancelled."""
    await ctx.report_progress(0, 1, "hanging")
    try:
        await anyio.sleep_forever()
        return "never"
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.Path(note).write_text("cancelled")


@mcp.tool()
async def log_message(words: str, ctx: Context) -> str:
    """Send `words` as a log message."""
    await ctx.session.send_log_message(  # pyright: ignore[reportDeprecated]
        "info", words, related_request_id=ctx.request_id
    )
    return "sent"


@mcp.tool()
async def add_tool(ctx: Context) -> str:
    """Add a tool."""
    mcp.add_tool(echo, name="another")
    await ctx.session.send_tool_list_changed()
    return "added"


@mcp.tool()
def headers(ctx: Context) -> str:
    return json.dumps(dict(ctx.headers or {}))


def serve(app: Starlette, path: str) -> None:
    import uvicorn

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    os.write(1, b"http://127.0.0.1:%d%s\n" % (listening.getsockname()[1], path.encode()))
    uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=0)).run(
        sockets=[listening]
    )


if sys.argv[1] == "stdio":
    mcp.run()
elif sys.argv[1] == "sse":
    serve(mcp.sse_app(), "/sse")
else:
    serve(mcp.streamable_http_app(json_response=sys.argv[1] == "json"), "/mcp")
