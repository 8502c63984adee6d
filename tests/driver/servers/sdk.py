"""A server on the MCP SDK: `sdk.py TOKEN`."""

from __future__ import annotations

import anyio
from mcp.server.mcpserver import Context, MCPServer

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


mcp.run()
