"""The benchmark's tool server, on the MCP SDK: `echo`, over stdio, or over HTTP on a socket that it inherits.

python3 echo_server.py                  stdio
python3 echo_server.py FD json|events   streamable HTTP on that listening descriptor
"""

import asyncio
import socket
import sys
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

ECHO = types.Tool(
    name="echo",
    description="Say it again.",
    input_schema={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)
Context = ServerRequestContext[Any, Any]


async def list_tools(ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[ECHO])


async def call_tool(ctx: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
    text = str((params.arguments or {}).get("text", ""))
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)])


server: Server[Any] = Server("echo", on_list_tools=list_tools, on_call_tool=call_tool)


async def serve_stdio() -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def serve_http(listener: socket.socket, *, as_json: bool) -> None:
    import uvicorn

    app = server.streamable_http_app(json_response=as_json)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if len(sys.argv) == 1:
    asyncio.run(serve_stdio())
else:
    serve_http(socket.socket(fileno=int(sys.argv[1])), as_json=sys.argv[2] == "json")
