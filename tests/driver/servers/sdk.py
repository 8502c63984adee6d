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


mcp.run()
