"""MCP server with the tools that the scenarios of `@modelcontextprotocol/conformance` require."""

from __future__ import annotations

from typing import Any

import anyio
import content
import mcp_types as types
import notifications
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import ListenHandler
from mcp.shared.exceptions import MCPError
from tool import Context, Result

NAME = "conformance-fixture"
TOOLS = {tool.name: tool for tool in (*content.TOOLS, *notifications.TOOLS)}


async def list_tools(ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[tool.definition() for tool in TOOLS.values()])


async def call_tool(ctx: Context, params: types.CallToolRequestParams) -> Result:
    if params.name not in TOOLS:
        raise MCPError(types.INVALID_PARAMS, f"Unknown tool: {params.name!r}")
    return await TOOLS[params.name].run(ctx, params)


async def set_level(ctx: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
    return types.EmptyResult()


def create_server() -> Server[dict[str, Any]]:
    server = Server(
        NAME,
        version="1",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_subscriptions_listen=ListenHandler(notifications.LIST_CHANGES),
    )
    server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_level)
    return server


async def serve_stdio() -> None:
    server = create_server()
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(serve_stdio)
