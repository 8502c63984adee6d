"""MCP server with the tools that the conformance suites require, over stdio or, with `--http`, over HTTP.

Names, arguments and results follow the scenarios of `@modelcontextprotocol/conformance`. The server by
itself passes all scenarios about tools, so that a failure through Decathlon is caused by Decathlon.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import anyio
import client_requests
import content
import mcp_types as types
import notifications
from mcp.server import Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import ListenHandler
from mcp.shared.exceptions import MCPError
from tool import Context, Result

NAME = "conformance-fixture"
TOOLS = {tool.name: tool for tool in (*content.TOOLS, *notifications.TOOLS, *client_requests.TOOLS)}


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
    server.middleware.append(RequestStateBoundary(RequestStateSecurity.ephemeral(), default_audience=NAME))
    return server


async def serve_stdio() -> None:
    server = create_server()
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def serve_http() -> None:
    """Listen on a free loopback port and print the URL on stdout."""
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp\n")
    sys.stdout.flush()
    # h11 strips whitespace around header values, as RFC 9110 section 5.5 requires; httptools keeps it after
    # the value.
    config = uvicorn.Config(create_server().streamable_http_app(), http="h11", log_level="warning")
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    if sys.argv[1:] == ["--http"]:
        serve_http()
    else:
        anyio.run(serve_stdio)
