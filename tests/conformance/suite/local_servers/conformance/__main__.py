"""The MCP server that the conformance suites ask for, as far as tools go: over stdio, or with `--http`.

Names, arguments and answers are those of the scenarios of `@modelcontextprotocol/conformance`. Served by
itself it passes all of them that are about tools; what fails through Decathlon is Decathlon's.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import anyio
import asking
import content
import mcp_types as types
import telling
from mcp.server import Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import ListenHandler
from mcp.shared.exceptions import MCPError
from tool import Answer, Context

NAME = "conformance-fixture"
TOOLS = {tool.name: tool for tool in (*content.TOOLS, *telling.TOOLS, *asking.TOOLS)}


async def list_tools(ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[tool.listed() for tool in TOOLS.values()])


async def call_tool(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    if params.name not in TOOLS:
        raise MCPError(types.INVALID_PARAMS, f"No tool is called {params.name!r}")
    return await TOOLS[params.name].run(ctx, params)


async def set_level(ctx: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
    return types.EmptyResult()


def server() -> Server[dict[str, Any]]:
    made = Server(
        NAME,
        version="1",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_subscriptions_listen=ListenHandler(telling.CHANGES),
    )
    made.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_level)
    made.middleware.append(RequestStateBoundary(RequestStateSecurity.ephemeral(), default_audience=NAME))
    return made


async def over_stdio() -> None:
    made = server()
    async with stdio_server() as (read, write):
        await made.run(read, write, made.create_initialization_options())


def over_http() -> None:
    """On a free port of the loopback, told in one line on stdout."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp\n")
    sys.stdout.flush()
    # h11 takes the spaces off a header's value, as RFC 9110 5.5 has it; httptools leaves them behind it.
    config = uvicorn.Config(server().streamable_http_app(), http="h11", log_level="warning")
    uvicorn.Server(config).run([listening])


if __name__ == "__main__":
    if sys.argv[1:] == ["--http"]:
        over_http()
    else:
        anyio.run(over_stdio)
